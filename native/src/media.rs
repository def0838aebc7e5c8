//! Where a block lies: the free text `medium` of an event, read without case.

/// Tier (0 device, 1 host, 2 disk, 3 external), whether a connector holds the block apart from the engine's own pool,
/// and whether the medium has a name that we know.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Place {
    pub tier: u8,
    pub connector: bool,
    pub known: bool,
}

impl Default for Place {
    fn default() -> Self {
        Self { tier: 0, connector: false, known: true }
    }
}

/// Spec: index-and-routing §2.2, engine-events §2.7. No medium: the device. An unknown one: the lowest tier.
pub fn place_of(medium: Option<&str>) -> Place {
    let Some(medium) = medium.filter(|text| !text.is_empty()) else { return Place::default() };
    if medium == "GPU" {
        return Place::default();
    }
    // White space as Python's `str.strip` has it.
    let name = medium.trim_matches(|c: char| c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)).to_uppercase();
    let tier = match name.as_str() {
        "GPU" | "DEVICE" => 0,
        "CPU" | "CPU_PINNED" | "CPU_TIER1" | "HOST" | "HOST_PINNED" => 1,
        "CPU_TIER2" | "DISK" | "NVME" | "STORAGE" | "FS" => 2,
        "EXTERNAL" | "NETWORK" | "REMOTE" | "SHARED" | "OBJ" => 3,
        _ => return Place { tier: 3, connector: true, known: false },
    };
    Place { tier, connector: matches!(name.as_str(), "CPU" | "STORAGE" | "FS" | "OBJ"), known: true }
}
