//! Why a run ended early, and with which exit code. There is no conversion from a plain error on purpose: whoever
//! passes one up says which of the two it is, so that no place can be forgotten.

use anyhow::Error;

/// Why a run ended early.
#[derive(Debug)]
pub enum Failure {
    /// The command line, the run file or something that it names (a file, a checkpoint, stored taps) is wrong: exit
    /// code 2.
    Input(Error),
    /// Something went wrong on the way: exit code 1.
    Work(Error),
}

impl Failure {
    /// What happened, and the exit code for it.
    pub fn into_parts(self) -> (Error, u8) {
        match self {
            Self::Input(error) => (error, 2),
            Self::Work(error) => (error, 1),
        }
    }
}

/// Says whose fault an error is.
pub trait Blame<T> {
    /// Reading what the user gave failed.
    fn input(self) -> Result<T, Failure>;
    /// The work itself failed.
    fn work(self) -> Result<T, Failure>;
}

impl<T, E: Into<Error>> Blame<T> for Result<T, E> {
    fn input(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::Input(error.into()))
    }

    fn work(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::Work(error.into()))
    }
}
