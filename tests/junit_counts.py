#!/usr/bin/env python3
"""Prints "PASSED FAILED SKIPPED NAMES..." of a ctest JUnit file; the names are of failed tests."""
import sys
import xml.etree.ElementTree as ElementTree


def main():
    passed, failed, skipped = 0, [], 0
    for case in ElementTree.parse(sys.argv[1]).getroot().iter("testcase"):
        status = case.get("status")
        if status == "run":
            passed += 1
        elif (mark := case.find("skipped")) is not None and "SKIP" in mark.get("message", ""):
            skipped += 1  # by return code or by output; a missing program is marked "skipped" too
        else:
            failed.append(case.get("name"))
    print(passed, len(failed), skipped, *failed)


if __name__ == "__main__":
    main()
