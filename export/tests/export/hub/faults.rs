//! Refusals, broken wires and lost answers: the repository has one whole commit or none, and a second push repairs.

use super::stub::Fault;
use super::{REPO, Scene};

#[test]
fn refusals_name_the_repository_and_the_token_s_variable() {
    for (status, words) in [
        (401, "wants a valid token, set HF_TOKEN"),
        (403, "does not allow it with the token from HF_TOKEN"),
        (404, "does not have it, or hides it"),
    ] {
        let scene = Scene::new();
        scene.stub.publish(REPO, &[(".gitattributes", b"")]);
        scene.stub.fail("/preupload/", &[Fault::Status(status)]);
        let error = scene.push(&[]).refused(1, &[REPO, words, "HF_TOKEN"]);
        assert!(error.contains("[token]"), "the hub repeats the token: {error}");
        assert_eq!(scene.stub.commits(REPO, "main"), 0);
        scene.check_secrets();
    }
    let scene = Scene::new();
    scene.stub.state().no_access = true;
    scene.push(&[]).refused(1, &[REPO, "set HF_TOKEN"]);
    assert!(scene.stub.state().models.is_empty());
    // the right token, not the right to make repositories
    let scene = Scene::new();
    scene.stub.fail("repos/create", &[Fault::Status(403)]);
    scene.push(&[]).refused(1, &[&format!("create {REPO}"), "HF_TOKEN"]);
}

#[test]
fn a_repository_that_appears_meanwhile_is_used() {
    let scene = Scene::new();
    // made, but the answer is that it was there
    scene.stub.fail("repos/create", &[Fault::Done(409)]);
    scene.push(&[]).passed();
    assert_eq!(scene.stub.commits(REPO, "main"), 1);
    // made, and the answer is lost: asked again, it is there
    let scene = Scene::new();
    scene.stub.fail("repos/create", &[Fault::Lost]);
    scene.push(&[]).passed();
    assert_eq!(
        (scene.stub.commits(REPO, "main"), scene.stub.count("repos/create")),
        (1, 2)
    );
}

#[test]
fn the_hub_s_own_trouble_is_waited_out_and_not_for_ever() {
    let scene = Scene::new();
    for route in ["repos/create", "/preupload/", "/commit/"] {
        scene.stub.fail(route, &[Fault::Status(503)]);
    }
    scene.push(&[]).passed();
    assert_eq!((scene.stub.commits(REPO, "main"), scene.stub.count("/commit/")), (1, 2));

    let scene = Scene::new();
    scene.stub.fail("/commit/", &[Fault::Status(500); 9]);
    scene
        .push(&[])
        .refused(1, &[REPO, "nothing was committed", "answers with an error"]);
    assert_eq!((scene.stub.commits(REPO, "main"), scene.stub.count("/commit/")), (0, 3));
    scene.check_secrets();
}

#[test]
fn an_upload_that_breaks_off_leaves_nothing_and_the_next_one_repairs() {
    let scene = Scene::new();
    scene.stub.fail("/commit/", &[Fault::Cut; 3]);
    scene
        .push(&[])
        .refused(1, &[REPO, "nothing was committed", "the connection broke"]);
    assert_eq!((scene.stub.commits(REPO, "main"), scene.stub.count("/commit/")), (0, 3));
    assert_eq!(scene.stub.files(REPO, "main").len(), 1);
    scene.push(&[]).passed();
    assert_eq!(scene.stub.commits(REPO, "main"), 1);
    scene.check_secrets();
}

#[test]
fn a_large_file_that_breaks_off_leaves_nothing_and_the_next_one_repairs() {
    let scene = Scene::new();
    scene.stub.state().large_from = Some(100_000);
    scene.stub.fail("/v1/xorbs/", &[Fault::Cut; 40]);
    scene.push(&[]).refused(1, &[REPO]);
    assert_eq!((scene.stub.commits(REPO, "main"), scene.stub.count("/commit/")), (0, 0));
    scene.stub.fail("/v1/xorbs/", &[]);
    scene.push(&[]).passed();
    assert_eq!(scene.stub.commits(REPO, "main"), 1);
    scene.check_secrets();
}

#[test]
fn a_commit_whose_answer_is_lost_is_not_made_twice() {
    for fault in [Fault::Lost, Fault::Done(500), Fault::Done(504)] {
        let scene = Scene::new();
        scene.stub.fail("/commit/", &[fault]);
        let out = scene.push(&[]).passed();
        assert_eq!(
            (scene.stub.commits(REPO, "main"), scene.stub.count("/commit/")),
            (1, 1),
            "{fault:?}"
        );
        let head = scene.stub.state().models[REPO].branches["main"].last().unwrap().clone();
        assert!(out.contains(&format!("/commit/{head}")), "{fault:?}: {out}");
    }
}

#[test]
fn a_proposal_whose_answer_is_lost_is_not_made_twice() {
    for fault in [Fault::Lost, Fault::Done(500)] {
        let scene = Scene::new();
        scene.stub.fail("/commit/", &[fault]);
        let words = ["Whether the proposal was made is not known", "/discussions"];
        scene.push(&["--create-pr"]).refused(1, &words);
        assert_eq!(scene.stub.state().models[REPO].proposals.len(), 1, "{fault:?}");
    }
}
