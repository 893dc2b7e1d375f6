//! A JSON report as a page or as CSV: `render_report REPORT.json OUT.html|OUT.csv`.

use std::path::Path;

use anyhow::{Context, Result, bail};
use dflash_eval::report::{Report, csv, html, write_text};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [from, to] = arguments.as_slice() else {
        bail!("usage: render_report REPORT.json OUT.html|OUT.csv")
    };
    let text = std::fs::read_to_string(from).with_context(|| from.clone())?;
    let report: Report = serde_json::from_str(&text).with_context(|| from.clone())?;
    let to = Path::new(to);
    match to.extension().and_then(|extension| extension.to_str()) {
        Some("html") => write_text(to, &html(&report)),
        Some("csv") => write_text(to, &csv(&report)),
        _ => bail!("{}: expected a name that ends in .html or .csv", to.display()),
    }
}
