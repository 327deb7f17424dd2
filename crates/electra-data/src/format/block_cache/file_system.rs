//! File systems on which a cache cannot be right: those that other machines write to, where a file that one machine has
//! removed is lost for another one that has mapped it.

use std::path::Path;

use crate::error::{Error, Result};

/// Refuses a folder, which need not exist yet, on a file system that other machines may share.
pub(super) fn check(dir: &Path) -> Result<()> {
    let parents =
        dir.ancestors().map(|parent| if parent.as_os_str().is_empty() { Path::new(".") } else { parent });
    match parents.filter_map(kind_of).next().flatten() {
        None => Ok(()),
        Some(kind) => {
            let dir = dir.display();
            Err(Error::Input(format!(
                "{dir} is on {kind}, which other machines may share; set data.cache_dir to a folder on a local disk"
            )))
        }
    }
}

/// The kind of a shared file system; `None` if the path does not exist.
fn kind_of(path: &Path) -> Option<Option<&'static str>> {
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).ok()?;
    // SAFETY: all bytes 0 are a valid `statfs`.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path ends with a zero, and the call writes only `found`; both outlive it.
    (unsafe { libc::statfs(path.as_ptr(), &mut found) } == 0).then(|| shared_kind(&found))
}

#[cfg(target_os = "linux")]
fn shared_kind(found: &libc::statfs) -> Option<&'static str> {
    name_of(found.f_type as u32)
}

/// The name of a shared file system by its magic number.
#[cfg(target_os = "linux")]
fn name_of(magic: u32) -> Option<&'static str> {
    Some(match magic {
        0x6969 => "NFS",
        0x0BD0_0BD0 => "Lustre",
        0x4750_4653 => "GPFS",
        0x517B | 0xFF53_4D42 | 0xFE53_4D42 => "CIFS",
        0x6573_5546 => "FUSE",
        0x0102_1997 => "9p",
        0x00C3_6400 => "Ceph",
        0x1983_0326 => "BeeGFS",
        0x5346_414F | 0x6B41_4653 => "AFS",
        0x0116_1970 => "GFS2",
        0x7461_636F => "OCFS2",
        0x2003_0528 => "OrangeFS",
        0x786F_4256 => "a shared folder of VirtualBox",
        _ => return None,
    })
}

#[cfg(not(target_os = "linux"))]
fn shared_kind(found: &libc::statfs) -> Option<&'static str> {
    (found.f_flags & libc::MNT_LOCAL as u32 == 0).then_some("a network file system")
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn file_systems_that_other_machines_share_are_refused() {
        // ext4, XFS, Btrfs, tmpfs, overlayfs, ZFS, F2FS
        let local = [0xEF53, 0x5846_5342, 0x9123_683E, 0x0102_1994, 0x794C_7630, 0x2FC1_2FC1, 0xF2F5_2010];
        assert_eq!(name_of(0xFE53_4D42), Some("CIFS"));
        assert!(local.iter().all(|&magic| name_of(magic).is_none()));
        // A folder that does not exist yet is where its nearest parent is.
        let dir = tempfile::tempdir().unwrap();
        check(&dir.path().join("a/b")).unwrap();
        assert_eq!(kind_of(&dir.path().join("a")), None);
    }
}
