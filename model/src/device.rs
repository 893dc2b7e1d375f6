//! Picks the device by name. The only file that mentions a backend feature.

use candle_core::{Device, Result};

/// The device called `name`: `cpu`, `metal` or `cuda`.
///
/// # Errors
/// When the name is unknown or the build lacks the backend's feature.
pub fn by_name(name: &str) -> Result<Device> {
    match name {
        "cpu" => Ok(Device::Cpu),
        "metal" if cfg!(feature = "metal") => Device::new_metal(0),
        "cuda" if cfg!(feature = "cuda") => Device::new_cuda(0),
        "metal" | "cuda" => candle_core::bail!("device {name:?}: this binary was built without --features {name}"),
        _ => candle_core::bail!("device {name:?}: expected cpu, metal or cuda"),
    }
}
