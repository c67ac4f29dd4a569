"""Run the determinism lint and the house style over production code; exit 1 when anything is found."""

import sys

from lint import determinism, house_style
from lint.sources import Finding, production_sources, without_allowed


def main() -> int:
    """Print every finding and one closing line."""
    findings: list[Finding] = []
    files = 0
    for source in production_sources():
        files += 1
        findings += without_allowed(determinism.check(source), determinism.ALLOWED)
        findings += without_allowed(house_style.check(source), house_style.ALLOWED)
    for finding in findings:
        print(finding)
    verdict = f"{len(findings)} found" if findings else "clean"
    print(f"determinism and house style: {files} files, {verdict}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
