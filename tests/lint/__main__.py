"""Run the lints and the search for import cycles over production code; exit 1 for a finding.

Lengths are printed as warnings and fail nothing: they ask to look whether a module is two things, never to cut one.
"""

import sys

from lint import determinism, house_style, owners
from lint.import_cycles import find_cycles, import_graph
from lint.sources import Finding, production_sources, without_allowed


def main() -> int:
    """Print every finding and one closing line."""
    findings: list[Finding] = []
    files = 0
    for source in production_sources():
        files += 1
        findings += without_allowed(determinism.check(source), determinism.ALLOWED)
        findings += without_allowed(owners.check(source), owners.ALLOWED)
        findings += without_allowed(house_style.check(source), house_style.ALLOWED)
    warnings = [finding for finding in findings if finding.rule in house_style.WARNINGS]
    findings = [finding for finding in findings if finding.rule not in house_style.WARNINGS]
    for finding in findings:
        print(finding)
    for warning in warnings:
        print(f"warning: {warning}")
    verdict = f"{len(findings)} found" if findings else "clean"
    print(f"determinism, owners of tasks and house style: {files} files, {verdict}")
    cycles = find_cycles(import_graph())
    for cycle in cycles:
        print(f"import cycle of {len(cycle)} modules: {' '.join(cycle)}")
    print(f"import cycles: {len(cycles) or 'none'}")
    return 1 if findings or cycles else 0


if __name__ == "__main__":
    sys.exit(main())
