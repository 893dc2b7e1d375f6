//! A server on a port of this machine that answers as it is told to.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::Value;

/// A request as it came.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) path: String,
    pub(crate) headers: String,
    pub(crate) body: Value,
}

/// How an answer is sent.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Sent {
    Whole,
    Chunked,
    /// Promises more bytes than come.
    Truncated,
    /// Keeps the line open without a word.
    Never,
}

pub(crate) struct Answer(pub(crate) u16, pub(crate) String, pub(crate) Sent);

/// Text, or JSON as text.
pub(crate) struct Body(String);

impl From<&str> for Body {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<String> for Body {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<Value> for Body {
    fn from(value: Value) -> Self {
        Self(value.to_string())
    }
}

/// An answer in one piece.
pub(crate) fn answer(status: u16, body: impl Into<Body>) -> Answer {
    Answer(status, body.into().0, Sent::Whole)
}

/// The stub; its thread ends with the test's process.
pub(crate) struct Stub {
    pub(crate) url: String,
    pub(crate) calls: Arc<Mutex<Vec<Call>>>,
}

impl Stub {
    pub(crate) fn new(handler: impl Fn(&Call) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let calls: Arc<Mutex<Vec<Call>>> = Arc::default();
        let (seen, handler) = (calls.clone(), Arc::new(handler));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (seen, handler) = (seen.clone(), handler.clone());
                std::thread::spawn(move || serve(&stream.unwrap(), &seen, &*handler));
            }
        });
        Self { url, calls }
    }

    /// The requests for answers.
    pub(crate) fn chats(&self) -> Vec<Call> {
        let calls = self.calls.lock().unwrap();
        calls
            .iter()
            .filter(|call| call.path.contains("/chat/"))
            .cloned()
            .collect()
    }
}

fn serve(mut stream: &TcpStream, seen: &Mutex<Vec<Call>>, handler: &dyn Fn(&Call) -> Answer) {
    let mut reader = BufReader::new(stream);
    let mut headers = String::new();
    while !headers.ends_with("\r\n\r\n") {
        if reader.read_line(&mut headers).unwrap_or(0) == 0 {
            return;
        }
    }
    let length = headers
        .lines()
        .find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).unwrap();
    let call = Call {
        path: headers.split(' ').nth(1).unwrap().to_owned(),
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
        headers,
    };
    seen.lock().unwrap().push(call.clone());
    let Answer(status, body, sent) = handler(&call);
    let head = format!("HTTP/1.1 {status} Whatever\r\nConnection: close\r\n");
    let bytes = match sent {
        Sent::Whole => format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()),
        Sent::Truncated => format!("{head}Content-Length: {}\r\n\r\n{body}", body.len() + 9),
        Sent::Chunked => {
            let (first, second) = body.split_at(body.len() / 2);
            let chunk = |part: &str| format!("{:x}\r\n{part}\r\n", part.len());
            format!(
                "{head}Transfer-Encoding: chunked\r\n\r\n{}{}0\r\n\r\n",
                chunk(first),
                chunk(second)
            )
        }
        Sent::Never => {
            std::thread::sleep(std::time::Duration::from_secs(5));
            return;
        }
    };
    // a client that gave up is no failure of the stub
    let _ = stream.write_all(bytes.as_bytes());
}
