"""The functions of `import lmforge` for programs: each is a thin layer over what the command line
uses too.

Begin with `training.py` (a whole stage). `models.py` has models, text, evaluation and files;
`custom_loop.py` the parts of a stage for a loop of one's own. What is public, and what its versions
promise, is in docs/library.md. `lmforge/__init__.py` names it, and imports these files when one of
their names is first used. No other package of lmforge uses this one.
"""
