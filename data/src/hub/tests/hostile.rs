//! A hub that lies: nothing is written outside the cache, nothing gets its name unchecked, and nobody waits for ever.

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use super::*;

/// All files below a folder, links not followed.
fn everything(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(everything(&path));
        } else {
            found.push(path);
        }
    }
    found
}

/// A server that does the same for every request, a thread each.
fn server(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let serve = Arc::new(serve);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let serve = Arc::clone(&serve);
            std::thread::spawn(move || serve(stream.unwrap()));
        }
    });
    address
}

fn asked(stream: &mut TcpStream) -> String {
    let mut request = [0; 4096];
    let length = stream.read(&mut request).unwrap_or_default();
    String::from_utf8_lossy(&request[..length]).into_owned()
}

#[test]
fn no_name_comes_from_a_header_and_none_from_a_listing_unless_it_is_a_hash() {
    let root = tempfile::tempdir().unwrap();
    let (cache, outside) = (root.path().join("cache"), root.path().join("outside"));
    fs::write(&outside, "private").unwrap();
    for etag in [outside.to_str().unwrap(), "../../../../evil", ""] {
        let stub = Stub::of(&model());
        stub.store.lock().unwrap().etag = Some(etag.to_owned());
        let folder = locate(&stub.hub(&cache), "hf://org/name").unwrap();
        assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), WEIGHTS, "{etag}");
        fs::remove_dir_all(&cache).unwrap();
    }
    for (key, value) in [
        ("oid", "../../../../evil"),
        ("oid", outside.to_str().unwrap()),
        ("oid", ""),
        ("path", "../../../config.json"),
    ] {
        let stub = Stub::of(&model());
        let mut entries: Vec<Value> = model().iter().map(|(path, body)| super::listed(path, body)).collect();
        entries[0][key] = value.into();
        stub.store.lock().unwrap().listing = Some(entries.into());
        refusal(&stub.hub(&cache), "hf://org/name");
    }
    let stub = Stub::of(&model());
    for commit in ["../../../evil", "", "main"] {
        let commit = commit.to_owned();
        stub.store.lock().unwrap().branches.insert("main".to_owned(), commit);
        let error = refusal(&stub.hub(&cache), "hf://org/name");
        assert!(error.contains("expected a commit"), "{error}");
    }
    let _ = fs::remove_dir_all(&cache);
    assert_eq!(everything(root.path()), std::slice::from_ref(&outside));
    assert_eq!(fs::read(outside).unwrap(), b"private");
}

#[test]
fn a_link_of_the_cache_that_leads_elsewhere_is_not_read() {
    let cache = tempfile::tempdir().unwrap();
    let stub = Stub::of(&model());
    let hub = stub.hub(cache.path());
    let folder = locate(&hub, "hf://org/name").unwrap();
    // left there by another tool
    let outside = cache.path().join("outside");
    fs::write(&outside, "private").unwrap();
    std::os::unix::fs::symlink(&outside, folder.join("LICENSE")).unwrap();
    for hub in [hub.clone(), hub.offline(true)] {
        let error = refusal(&hub, "hf://org/name");
        assert!(error.contains("not to a file of the cache"), "{error}");
    }
}

#[test]
fn what_a_killed_process_left_is_not_trusted() {
    let cache = tempfile::tempdir().unwrap();
    let stub = Stub::of(&model());
    let blobs = cache.path().join("models--org--name/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let blob = blobs.join(sha256_hex(WEIGHTS));
    fs::write(blob.with_extension("unfinished"), "a longer beginning than the file").unwrap();
    // another tool's blob, of another length, and of the same
    for body in ["<html>", "weighty"] {
        fs::write(&blob, body).unwrap();
        let folder = locate(&stub.hub(cache.path()), "hf://org/name").unwrap();
        assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), WEIGHTS);
    }
    assert!(!blob.with_extension("unfinished").exists());
}

#[test]
fn a_whole_cache_that_cannot_be_written_is_enough() {
    use std::os::unix::fs::PermissionsExt as _;
    let cache = tempfile::tempdir().unwrap();
    let stub = Stub::of(&model());
    let hub = stub.hub(cache.path());
    let folder = locate(&hub, "hf://org/name").unwrap();
    let before: Vec<_> = everything(cache.path());
    let times = |paths: &[PathBuf]| -> Vec<_> {
        let modified = |path: &PathBuf| fs::symlink_metadata(path).unwrap().modified().unwrap();
        paths.iter().map(modified).collect()
    };
    let then = times(&before);
    let lock = |mode: u32| {
        for folder in ["", "/refs", "/blobs", &format!("/snapshots/{FIRST}")] {
            let path = format!("{}/models--org--name{folder}", cache.path().display());
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    lock(0o555);
    assert_eq!(locate(&hub, "hf://org/name").unwrap(), folder);
    lock(0o755);
    // root may write all the same: nothing was
    assert_eq!((everything(cache.path()), times(&before)), (before.clone(), then));
}

#[test]
fn trouble_on_this_machine_is_not_blamed_on_the_hub() {
    let root = tempfile::tempdir().unwrap();
    let cache = root.path().join("cache");
    fs::write(&cache, "a file").unwrap();
    let stub = Stub::of(&model());
    let error = refusal(&stub.hub(&cache), "hf://org/name");
    assert!(
        error.contains(&cache.display().to_string()) && !error.contains("answer"),
        "{error}"
    );
    for endpoint in ["ftp://x", "localhost:80", ""] {
        let error = refusal(&Hub::default().at(endpoint).cached_in(&cache), "hf://org/name");
        assert!(error.contains("HF_ENDPOINT: expected http:// or https://"), "{error}");
    }
}

#[test]
fn an_answer_that_is_no_hub_s_is_called_that() {
    let cache = tempfile::tempdir().unwrap();
    for body in ["<html>hello</html>", "", "[]", "{\"sha\": 7}"] {
        let address = server(move |mut stream| {
            asked(&mut stream);
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                body.len()
            );
            let _ = stream.write_all(&[head.as_bytes(), body.as_bytes()].concat());
        });
        let error = refusal(&Hub::default().at(&address).cached_in(cache.path()), "hf://org/name");
        assert!(
            error.contains("answered what the hub would not")
                && error.contains("GET /api/models/org/name/revision/main"),
            "{error}"
        );
        assert!(!error.contains("cannot be reached"), "{error}");
    }
}

#[test]
fn what_a_server_says_moves_no_cursor() {
    let cache = tempfile::tempdir().unwrap();
    let body = r#"{"error": "\u001b[2J\u001b]0;title\u0007gone"}"#;
    let address = server(move |mut stream| {
        asked(&mut stream);
        let head = format!(
            "HTTP/1.1 400 X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        let _ = stream.write_all(&[head.as_bytes(), body.as_bytes()].concat());
    });
    let error = refusal(&Hub::default().at(&address).cached_in(cache.path()), "hf://org/name");
    assert!(error.contains("gone") && !error.contains(char::is_control), "{error:?}");
}

#[test]
fn a_silent_server_is_given_up() {
    let cache = tempfile::tempdir().unwrap();
    let silent = server(|mut stream| {
        asked(&mut stream);
        std::thread::sleep(Duration::from_secs(60));
    });
    let half = server(|mut stream| {
        asked(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{");
        std::thread::sleep(Duration::from_secs(60));
    });
    for address in [silent, half] {
        let hub = Hub::default().at(&address).cached_in(cache.path());
        let begun = Instant::now();
        let error = refusal(&hub.with_patience(Duration::from_secs(1)), "hf://org/name");
        assert!(
            error.contains("sent nothing for 1 s") && error.contains("/revision/main"),
            "{error}"
        );
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn an_answer_without_end_is_cut_off() {
    let cache = tempfile::tempdir().unwrap();
    // of a listing, by the limit; of a file, by its size
    let endless = |mut stream: TcpStream| {
        let request = asked(&mut stream);
        if request.contains("/revision/") {
            let body = format!("{{\"sha\": \"{FIRST}\"}}");
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                body.len()
            );
            let _ = stream.write_all(&[head.as_bytes(), body.as_bytes()].concat());
            return;
        }
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n[");
        let blanks = vec![b' '; 1 << 16];
        while stream.write_all(&blanks).is_ok() {}
    };
    let error = refusal(
        &Hub::default().at(&server(endless)).cached_in(cache.path()),
        "hf://org/name",
    );
    assert!(
        error.contains("more than 67108864 bytes") && error.contains("/tree/"),
        "{error}"
    );

    let stub = Stub::of(&model());
    let long = vec![b'x'; 1 << 20];
    stub.store.lock().unwrap().wrong.insert("README.md".to_owned(), long);
    let error = refusal(&stub.hub(cache.path()), "hf://org/name");
    assert!(error.contains("more than the 6 bytes"), "{error}");
    for file in everything(cache.path()) {
        assert!(
            fs::metadata(&file).map_or(0, |metadata| metadata.len()) < 1000,
            "{}",
            file.display()
        );
    }
}
