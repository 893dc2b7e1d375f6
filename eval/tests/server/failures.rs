//! Servers that refuse, break off, lie or are none.

use std::time::Instant;

use super::stub::Sent;
use super::*;

#[test]
fn an_unknown_server_is_named_with_everything_that_was_tried() {
    // TensorRT-LLM has a /version, too
    let stub = Stub::new(|call| match call.path.as_str() {
        "/version" => answer(200, json!({"version": "1.0"})),
        "/props" => answer(403, "no"),
        _ => answer(404, "nothing here"),
    });
    let error = refused(measured(&stub, |_| ()));
    for part in [
        "/server_info: HTTP 404",
        "/props: HTTP 403",
        "/version: HTTP 200",
        "/metrics: HTTP 404",
        "--engine",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn speculation_that_is_off_is_refused_with_the_flag_that_switches_it_on() {
    let off = vllm(|_, _| 1, |_| "vllm:generation_tokens_total 3\n".into());
    assert!(refused(measured(&off, |_| ())).contains("--speculative-config"));
    assert!(off.chats().is_empty(), "no prompt may be sent");
    let off = Stub::new(|_| answer(200, json!({"speculative_algorithm": null, "internal_states": []})));
    assert!(refused(measured(&off, |_| ())).contains("--speculative-algorithm DFLASH"));
    let idle = vllm(|_, _| 1, vllm_metrics);
    assert!(failed(measured(&idle, |_| ())).contains("no draft"));
}

#[test]
fn a_restart_in_the_middle_is_an_error() {
    let restarted = vllm(
        |counted, _| {
            counted.drafts.store(3, SeqCst);
            4
        },
        vllm_metrics,
    );
    let error = failed(measured(&restarted, |_| ()));
    assert!(
        error.contains("from 1000 to 3") && error.contains("restarted"),
        "{error}"
    );
    // grown past its old value, and still another process
    let overtaken = vllm(Counted::both, |counted| {
        let start = counted.drafts.load(SeqCst) / 1003;
        format!("process_start_time_seconds 1.7{start}e+09\n{}", vllm_metrics(counted))
    });
    assert!(failed(measured(&overtaken, |_| ())).contains("process_start_time_seconds"));
}

#[test]
fn counters_that_are_no_counts_are_refused() {
    for bad in ["NaN", "-3.0", "+Inf", "1.5", "many"] {
        let stub = vllm(Counted::both, move |counted| {
            let drafts = counted.drafts.load(SeqCst);
            vllm_metrics(counted).replace(&format!("{drafts}.0"), bad)
        });
        let error = refused(measured(&stub, |_| ()));
        assert!(error.contains("line ") && error.contains(bad), "{error}");
    }
    let lying = vllm(Counted::both, |counted| {
        let drafted = counted.drafts.load(SeqCst) * K;
        vllm_metrics(counted).replace(&format!("{drafted}.0"), &format!("{}.0", 7000 + drafted % 7000 / 42))
    });
    assert!(failed(measured(&lying, |_| ())).contains("contradict"));
}

/// A vLLM whose second answer is this.
fn second(status: u16, body: &'static str, sent: Sent) -> Stub {
    let counted = Counted::default();
    Stub::new(move |call| match call.path.as_str() {
        "/metrics" => answer(200, vllm_metrics(&counted)),
        "/v1/models" => models(),
        "/v1/chat/completions" if is_first(call) => answer(200, chat(counted.both(call))),
        "/v1/chat/completions" => Answer(status, body.into(), sent),
        _ => answer(404, ""),
    })
}

#[test]
fn a_failed_answer_names_its_prompt_and_what_the_server_said() {
    for (status, body, sent, expected) in [
        (
            400,
            "{\"message\": \"prompt too long\"}",
            Sent::Whole,
            "HTTP 400: {\"message\": \"prompt too long\"}",
        ),
        (
            500,
            "Internal Server Error",
            Sent::Whole,
            "HTTP 500: Internal Server Error",
        ),
        (302, "", Sent::Whole, "HTTP 302"),
        (200, "<html>", Sent::Whole, "not JSON"),
        (200, "{\"choices\": [", Sent::Whole, "not JSON"),
        (200, "{\"usage\": {}}", Sent::Whole, "usage.completion_tokens"),
        (
            200,
            "{\"usage\": {\"completion_tokens\": -1}}",
            Sent::Whole,
            "usage.completion_tokens",
        ),
        (200, "{\"usage\"", Sent::Truncated, "broke off"),
    ] {
        let error = failed(measured(&second(status, body, sent), |_| ()));
        assert!(
            error.contains("prompts.jsonl:3") && error.contains("after 1 of 2"),
            "{error}"
        );
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

#[test]
fn a_silent_server_is_given_up_after_the_timeout() {
    let start = Instant::now();
    let error = failed(measured(&second(200, "", Sent::Never), |request| {
        request.timeout = Duration::from_millis(400);
    }));
    assert!(
        error.contains("no answer within 0.4 s") && error.contains("prompts.jsonl:3"),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(4));
}

#[test]
fn chunked_answers_are_read_whole() {
    let counted = Counted::default();
    let stub = Stub::new(move |call| {
        let Answer(status, body, _) = match call.path.as_str() {
            "/metrics" => answer(200, vllm_metrics(&counted)),
            "/v1/models" => models(),
            "/v1/chat/completions" => answer(200, chat(counted.both(call))),
            _ => answer(404, "not found"),
        };
        Answer(status, body, Sent::Chunked)
    });
    assert_eq!(report(&stub).ours.acceptance_length, Some(4.5));
}

#[test]
fn requests_carry_the_prompts_without_their_answers_and_every_sampling_key() {
    let stub = vllm(Counted::both, vllm_metrics);
    let result = measured(&stub, |request| {
        request.thinking = Some(true);
        request.concurrency = 9;
        request.sampling.temperature = 0.7;
    });
    let report = result.ok().unwrap();
    assert_eq!(
        report.per_prompt[0].completion_tokens, 26,
        "answers stay with their prompts"
    );
    assert_eq!(report.per_prompt[1].completion_tokens, 3);
    let chats = stub.chats();
    let (first, second) = if is_first(&chats[0]) { (0, 1) } else { (1, 0) };
    let (first, second) = (&chats[first].body, &chats[second].body);
    assert_eq!(first["messages"], json!([{"role": "user", "content": "first"}]));
    assert_eq!(first["chat_template_kwargs"]["enable_thinking"], true);
    assert_eq!(
        second["chat_template_kwargs"]["enable_thinking"], false,
        "the row's own switch"
    );
    for (key, value) in [
        ("model", json!("stub-model")),
        ("max_tokens", json!(64)),
        ("temperature", json!(0.7)),
        ("top_p", json!(1.0)),
        ("top_k", json!(-1)),
        ("min_p", json!(0.0)),
        ("repetition_penalty", json!(1.0)),
        ("presence_penalty", json!(0.0)),
        ("seed", json!(1)),
        ("stream", json!(false)),
    ] {
        assert_eq!(first[key], value, "{key}");
    }
    assert!(first.get("return_meta_info").is_none(), "only SGLang knows it");
}

#[test]
fn several_models_want_a_choice() {
    let stub = Stub::new(|call| match call.path.as_str() {
        "/v1/models" => answer(200, json!({"data": [{"id": "a"}, {"id": "b"}]})),
        "/server_info" => answer(200, json!({"internal_states": []})),
        _ => answer(404, ""),
    });
    assert!(refused(measured(&stub, |_| ())).contains("lists a, b; name one of them with --model"));
}
