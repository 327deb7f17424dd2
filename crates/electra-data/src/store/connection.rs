//! How requests are sent: by the crate's HTTP client, but no answer is longer than anything that is asked for.

use std::future::Future;
use std::pin::Pin;

use futures_util::StreamExt;
use http_body_util::{BodyExt, Limited};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, Result};

/// The longest answer: a list, or a whole object. Ranges and objects have tighter limits where they are read.
const MAX_ANSWER: usize = 1 << 30;
/// The longest part of a refusal that is read. Only its code and message are shown.
const MAX_REFUSAL: usize = 64 << 10;

/// Makes the clients of a store.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> Result<HttpClient> {
        ReqwestConnector::default().connect(options).map(|client| HttpClient::new(Bounded(client)))
    }
}

/// A client whose answers have a limit, because the crate reads lists and refusals whole.
#[derive(Debug)]
struct Bounded(HttpClient);

type Answer<'a> = Pin<Box<dyn Future<Output = std::result::Result<HttpResponse, HttpError>> + Send + 'a>>;

impl HttpService for Bounded {
    fn call<'s, 'a>(&'s self, request: HttpRequest) -> Answer<'a>
    where
        's: 'a,
        Self: 'a,
    {
        Box::pin(async move {
            let answer = self.0.execute(request).await?;
            if answer.status().is_success() {
                let failed = |error| HttpError::new_boxed(HttpErrorKind::Unknown, error);
                return Ok(
                    answer.map(|body| HttpResponseBody::new(Limited::new(body, MAX_ANSWER).map_err(failed)))
                );
            }
            let (head, body) = answer.into_parts();
            let (mut text, mut pieces) = (Vec::new(), body.bytes_stream());
            while let Some(piece) = pieces.next().await
                && text.len() < MAX_REFUSAL
            {
                text.extend_from_slice(&piece?);
            }
            let text = String::from_utf8_lossy(&text).into_owned();
            Ok(HttpResponse::from_parts(head, text.into()))
        })
    }
}
