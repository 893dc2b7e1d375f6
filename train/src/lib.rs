//! Trains DFlash and DFlash 2 drafters.
pub mod loss;
pub mod step;
