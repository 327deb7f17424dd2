"""Removes the build machine's folders from the SBOM of a wheel: `python clean_wheel.py WHEEL...`.

maturin names the crates of this workspace there by their absolute paths.
"""

import base64
import hashlib
import os
import re
import sys
import zipfile


def clean(wheel: str) -> None:
    """Rewrites a wheel whose SBOM has absolute paths, with the new hash and size in RECORD, its last file."""
    record = b""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(f"{wheel}.part", "w") as target:
        for file in source.infolist():
            data = source.read(file)
            if "/sboms/" in file.filename:
                data = re.sub(rb'path\+file://[^"#]*/', b"", data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
            if file.filename.endswith(".dist-info/RECORD"):
                data = record + file.filename.encode() + b",,\n"
            record += b"%s,sha256=%s,%d\n" % (file.filename.encode(), digest, len(data))
            target.writestr(file, data)
    os.replace(f"{wheel}.part", wheel)


for each in sys.argv[1:]:
    clean(each)
