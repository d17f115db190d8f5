"""Run inside the router's image: each wheel that is installed, and each file that is not as its wheel brought it."""

import base64
import hashlib
import sys
from importlib.metadata import distributions
from pathlib import Path

LIB = Path("/opt/router/lib")
BY_THE_INSTALLER = {"INSTALLER", "REQUESTED", "direct_url.json"}
wrong = []
known = set()
for each in distributions(path=[str(LIB)]):
    print(f"{each.metadata['Name'].lower().replace('_', '-').replace('.', '-')}=={each.version}")
    for file in each.files or ():
        path = Path(str(file.locate()))
        if file.parts[0] in ("..", "bin"):
            continue  # commands, which are left out of the image
        known.add(path)
        if file.hash is None or path.name in BY_THE_INSTALLER:
            continue
        digest = hashlib.new(file.hash.mode, path.read_bytes()).digest() if path.is_file() else b""
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            wrong.append(f"not its wheel's: {path}")
wrong += [f"added: {path}" for path in LIB.rglob("*") if path.is_file() and path not in known]
print("\n".join(sorted(wrong)))
sys.exit(bool(wrong))
