"""What changes with a release of a library: one file, one `Patch`, in the folder of its library.

`replay_patch.patching.registry` finds the files; `docs/patches.md` is made from them. A file whose
name begins with an underscore holds what several patches share, and is no patch.
"""
