"""Imported first: finds a Python with the packages that a comparison needs, or skips it (exit 77).

`scripts/check --oracle` makes .venv-oracle at the root and sets BATON_ORACLE; then a missing package is a failure.
"""
import importlib.util
import os
import sys


def need(*packages, venv='.venv-oracle'):
    if all(importlib.util.find_spec(name) for name in packages):
        return
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    python = os.environ.get('BATON_ORACLE_PYTHON', os.path.join(root, venv, 'bin', 'python'))
    if os.path.exists(python) and os.environ.get('BATON_ORACLE_TRIED') != '1':
        os.environ['BATON_ORACLE_TRIED'] = '1'
        os.execv(python, [python] + sys.argv)
    print('needs the Python packages %s: scripts/check --oracle installs them' % ', '.join(packages))
    sys.exit(1 if os.environ.get('BATON_ORACLE') else 77)
