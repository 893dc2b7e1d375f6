//! The program itself: exit codes, output, files, and secrets that stay secret.

use std::process::{Command, Output};

use super::*;

fn program(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dflash-eval"))
        .args(arguments)
        .env("STUB_KEY", "sk-very-secret")
        .env_remove("RUST_BACKTRACE")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn acceptance_with_a_server_is_the_command_server() {
    let (folder, path) = prompts();
    let path = path.to_str().unwrap();
    for option in [["server", "--url"], ["server", "--server"], ["acceptance", "--server"]] {
        let stub = vllm(Counted::both, vllm_metrics);
        let json = folder.path().join("report.json");
        let output = program(&[
            option[0],
            option[1],
            &stub.url,
            "--prompts",
            path,
            "--quiet",
            "--json",
            json.to_str().unwrap(),
            "--api-key-env",
            "STUB_KEY",
        ]);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{err}");
        assert!(
            out.contains("acceptance length     4.500") && err.is_empty(),
            "{out}{err}"
        );
        let written = std::fs::read_to_string(&json).unwrap();
        let report: Value = serde_json::from_str(&written).unwrap();
        assert_eq!(report["kind"], "server");
        assert_eq!(report["ours"]["acceptance_length"], 4.5);
        assert!(!written.contains("very-secret") && !out.contains("very-secret"));
        assert!(
            stub.calls
                .lock()
                .unwrap()
                .iter()
                .all(|call| call.headers.contains("Bearer sk-very-secret"))
        );
        std::fs::remove_file(json).unwrap();
    }
}

#[test]
fn a_failure_in_the_middle_exits_1_and_writes_nothing() {
    let (folder, path) = prompts();
    let counted = Counted::default();
    let stub = Stub::new(move |call| match call.path.as_str() {
        "/metrics" => answer(200, vllm_metrics(&counted)),
        "/v1/models" => models(),
        // an unfriendly server that repeats the key
        "/v1/chat/completions" => answer(401, call.headers.as_str()),
        _ => answer(404, ""),
    });
    let json = folder.path().join("report.json");
    let output = program(&[
        "server",
        "--url",
        &stub.url,
        "--prompts",
        path.to_str().unwrap(),
        "--json",
        json.to_str().unwrap(),
        "--api-key-env",
        "STUB_KEY",
    ]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        error.contains("prompts.jsonl:1") && error.contains("HTTP 401"),
        "{error}"
    );
    assert!(error.contains("[API key]") && !error.contains("very-secret"), "{error}");
    assert!(!json.exists());
}

#[test]
fn bad_usage_and_a_server_that_is_not_there_exit_2() {
    let (folder, path) = prompts();
    let path = path.to_str().unwrap();
    let empty = folder.path().join("empty.jsonl");
    std::fs::write(&empty, "\n").unwrap();
    // a port that nobody listens on any more
    let gone = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .to_string();
    let gone = format!("http://me:hidden@{gone}");
    for (arguments, expected) in [
        (vec!["server", "--url", &gone, "--prompts", path], "refused"),
        (
            vec!["server", "--url", "https://me:hidden@h", "--prompts", path],
            "https is not built in",
        ),
        (vec!["server", "--url", &gone, "--prompts", "/nowhere"], "/nowhere"),
        (
            vec!["server", "--url", &gone, "--prompts", empty.to_str().unwrap()],
            "no rows",
        ),
        (
            vec![
                "server",
                "--url",
                &gone,
                "--prompts",
                path,
                "--api-key-env",
                "NO_SUCH_KEY",
            ],
            "NO_SUCH_KEY",
        ),
        (
            vec!["server", "--url", &gone, "--prompts", path, "--thinking", "both"],
            "--thinking both",
        ),
        (
            vec!["server", "--url", &gone, "--prompts", path, "--timeout", "0"],
            "--timeout",
        ),
        (
            vec!["server", "--url", &gone, "--prompts", path, "--concurrency", "0"],
            "--concurrency",
        ),
        (vec!["server", "--prompts", path], "--url"),
        (
            vec!["acceptance", "--server", &gone, "--device", "cpu", "--prompts", path],
            "--device",
        ),
        (
            vec!["acceptance", "--server", &gone, "--target", "x", "--prompts", path],
            "--target",
        ),
        (vec!["acceptance", "--drafter", "x", "--prompts", path], "--target"),
        (vec!["acceptance", "--target", "x", "--prompts", path], "--drafter"),
        (
            vec![
                "acceptance",
                "--target",
                "x",
                "--drafter",
                "y",
                "--engine",
                "vllm",
                "--prompts",
                path,
            ],
            "--engine",
        ),
        (vec!["lossless", "--drafter", "x", "--prompts", path], "--target"),
    ] {
        let output = program(&arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(
            error.contains(expected) && !error.contains("hidden"),
            "{arguments:?}: {error}"
        );
    }
}
