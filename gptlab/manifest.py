"""Whether a checkpoint can be believed: its manifest says size and SHA-256 of each file, its state which step it is.

    >>> from pathlib import Path
    >>> from gptlab.manifest import fault
    >>> fault(Path("runs/first/checkpoints/step-00002000"))    # None where all holds

No link is followed, and no name in a manifest leads out of its folder. Left out on purpose: writing and reading
checkpoints (`checkpoint.py`, which also says what they hold).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from gptlab.jsonfile import read_json

FORMAT = 1
"""Version of the layout, in state.json and in the manifest."""
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"


def fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None if its manifest holds."""
    try:
        return _fault(checkpoint)
    except OSError as error:  # no permission, or a name that no file can have
        return f"it cannot be read ({error.strerror})"


def _fault(checkpoint: Path) -> str | None:
    if checkpoint.is_symlink():
        return "it is a link"
    manifest = None if (checkpoint / MANIFEST).is_symlink() else read_json(checkpoint / MANIFEST)
    if manifest is None:
        return f"{MANIFEST} is missing or unreadable"
    if manifest.get("format") != FORMAT:
        return f"its format is {manifest.get('format')!r}, not {FORMAT}"
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        return f"{MANIFEST} lists no files"
    for name, entry in files.items():
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            return f"{MANIFEST} names {name!r}, which is no file of its folder"
        path = checkpoint / name
        if path.is_symlink():
            return f"{name} is a link"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry.get("bytes"):
            return f"{name} has {path.stat().st_size} bytes, not {entry.get('bytes')}"
        if sha256(path) != entry.get("sha256"):
            return f"{name} does not have its checksum"
    missing = {MODEL, OPTIMIZER, STATE} - set(files)
    if missing:
        return f"{min(missing)} is not in its manifest"
    number, step = checkpoint.name.removeprefix("step-"), (read_json(checkpoint / STATE) or {}).get("step")
    if type(step) is not int or step < 0:
        return f"{STATE} says no step"
    # A folder that was renamed, or put in the place of another: its step decides which windows come next.
    return f"{STATE} is of step {step}" if number.isdecimal() and int(number) != step else None


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
