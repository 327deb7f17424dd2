"""Removes the build machine's folders from a wheel's SBOM, and makes the links of its description absolute.

`python clean_wheel.py WHEEL...`. maturin records the crates of this workspace with absolute paths, and copies
README.md with its relative links; package indexes show it without the linked files.
"""

import base64
import hashlib
import os
import re
import sys
import zipfile

from site_pages import TREE, with_addresses


def description(metadata: str) -> str:
    """Returns a wheel's metadata in which the links of the description lead to the files of its version."""
    version = re.search(r"^Version: (.*)", metadata, re.MULTILINE)
    assert version, "no version in METADATA"
    header, blank, text = metadata.partition("\n\n")
    return header + blank + with_addresses(text, TREE / "README.md", f"v{version[1]}")


def clean(wheel: str) -> None:
    """Rewrites a wheel's SBOM and description, with their new hashes and sizes in RECORD, its last file."""
    record = b""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(f"{wheel}.part", "w") as target:
        for file in source.infolist():
            data = source.read(file)
            if "/sboms/" in file.filename:
                data = re.sub(rb'path\+file://[^"#]*/', b"", data)
            elif file.filename.endswith(".dist-info/METADATA"):
                data = description(data.decode()).encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
            if file.filename.endswith(".dist-info/RECORD"):
                data = record + file.filename.encode() + b",,\n"
            record += b"%s,sha256=%s,%d\n" % (file.filename.encode(), digest, len(data))
            target.writestr(file, data)
    os.replace(f"{wheel}.part", wheel)


if __name__ == "__main__":
    for wheel in sys.argv[1:]:
        clean(wheel)
