"""docs/incidents.md: every incident once, and every test that it names exists.

    check_incidents.py SOURCE_DIR
"""
import os
import re
import sys

top = sys.argv[1]
COUNTS = {"A": 24, "B": 12, "C": 14, "D": 7, "E": 18, "F": 14, "G": 6, "H": 6, "I": 12, "J": 4, "K": 4, "L": 5, "M": 4}


def text(*parts):
    with open(os.path.join(top, *parts), encoding="utf-8") as file:
        return file.read()


points = {name: actions for name, actions in re.findall(r'P\(\w+, "([\w.]+)", ([^"]*?), *\\?\s*"', text("base", "fault.h"))}
scenarios = "".join(text("scripts", "lib", "drill", name) for name in os.listdir(os.path.join(top, "scripts", "lib", "drill"))
                    if name.endswith(".py"))
wrong = []
rows = re.findall(r"^\| ([A-M]\d+) \| ([^|]+) \| (.+) \|$", text("docs", "incidents.md"), re.M)
wanted = [f"{letter}{i}" for letter, n in COUNTS.items() for i in range(1, n + 1)]
if [row[0] for row in rows] != wanted:
    wrong.append(f"ids: {sorted(set(wanted) ^ {row[0] for row in rows})} missing, strange or out of order")
for number, _, cover in rows:
    names = re.findall(r"`([^`]+)`", cover)
    if not names and not cover.startswith("by construction"):
        wrong.append(f"{number}: neither a test nor a construction")
    for name in names:
        where, _, what = name.partition(": ")
        if where == "points":
            point, _, action = what.partition("=")
            groups = {"FAULT_MESSAGE": "fail drop delay duplicate reorder corrupt cut", "FAULT_PUT":
                      "fail delay duplicate reorder corrupt"}
            can = " ".join(groups.get(word, word.lower()) for word in re.findall(r"\w+", points.get(point, "")))
            if action not in can.split():
                wrong.append(f"{number}: no fault point {what}")
        elif where == "drill":
            if f'"{what}"' not in scenarios:
                wrong.append(f"{number}: no scenario {what}")
        elif where.startswith("scripts/"):
            if not os.path.exists(os.path.join(top, where.split(" ")[0])):
                wrong.append(f"{number}: no {where}")
        elif "/" in where and re.search(r"\.(py|c)$", where):
            path = where if os.path.exists(os.path.join(top, where)) else os.path.join("tests", where)
            if not os.path.exists(os.path.join(top, path)):
                wrong.append(f"{number}: no file {where}")
            elif what and not re.search(rf"\b{what}\b", text(path)):
                wrong.append(f"{number}: {where} has no {what}")
print("\n".join(wrong) or f"{len(rows)} incidents")
sys.exit(bool(wrong))
