"""Which Python source may be used: the standard library and installed packages with a permissive licence."""

from __future__ import annotations

import re
import sysconfig
from importlib import metadata
from pathlib import Path

PERMISSIVE = re.compile(r"MIT|BSD-[1-4]-Clause|0BSD|Apache-2\.0|PSF-2\.0|Python-2\.0|ISC|Unlicense|CC0-1\.0")
PERMISSIVE_CLASSIFIERS = {
    "License :: CC0 1.0 Universal (CC0 1.0) Public Domain Dedication",
    "License :: OSI Approved :: Apache Software License",
    "License :: OSI Approved :: BSD License",
    "License :: OSI Approved :: ISC License (ISCL)",
    "License :: OSI Approved :: MIT License",
    "License :: OSI Approved :: Python Software Foundation License",
    "License :: OSI Approved :: The Unlicense (Unlicense)",
    "License :: OSI Approved :: Zero-Clause BSD (0BSD)",
}
# What a package carries along from others may have another licence.
CARRIED_ALONG = {"extern", "external", "externals", "third_party", "thirdparty", "vendor", "vendored"}
TESTS = {"test", "tests", "idle_test", "conftest.py"}
NOT_OF_THE_LIBRARY = {"site-packages", "dist-packages", "lib-dynload"}


def source_files() -> list[Path]:
    """Public modules of the standard library and of permissively licensed packages, in an order of their own."""
    library = Path(sysconfig.get_path("stdlib"))
    found: dict[tuple[str, str], Path] = {}
    for file in library.rglob("*.py"):
        parts = file.relative_to(library).parts
        if parts[0] not in NOT_OF_THE_LIBRARY and is_public(parts):
            found["", "/".join(parts)] = file
    for package in metadata.distributions():
        described = package.metadata  # parsed anew at each access
        if is_permissive(described):
            for path in package.files or []:
                if path.suffix == ".py" and is_public(path.parts):
                    found.setdefault((described["Name"], "/".join(path.parts)), Path(str(package.locate_file(path))))
    return [found[name] for name in sorted(found)]


def is_permissive(described: metadata.PackageMetadata) -> bool:
    """Whether every licence that the package names is a permissive one; what names none is not."""
    if expressions := described.get_all("License-Expression"):
        named = re.sub(r"\b(?:AND|OR)\b|[()]", " ", " ".join(expressions)).split()
        return bool(named) and all(PERMISSIVE.fullmatch(licence) for licence in named)
    classifiers = {line for line in described.get_all("Classifier") or [] if line.startswith("License ::")}
    return bool(classifiers) and classifiers <= PERMISSIVE_CLASSIFIERS


def is_public(parts: tuple[str, ...]) -> bool:
    private = any(part.startswith(("_", ".")) and part != "__init__.py" for part in parts)
    test = parts[-1].startswith("test_") or parts[-1].endswith(("_test.py", "_tests.py")) or not TESTS.isdisjoint(parts)
    return not private and not test and CARRIED_ALONG.isdisjoint(parts)
