"""Tests on several gloo ranks of one real Megatron-core release, the one first on the path.

This process only imports, which makes forking ranks from it cheap. It must never make process
groups, not even of one process: ranks forked after that would hang, and `launch` refuses.
"""

from helpers.cpu_bed import pytest_report_header

__all__ = ["pytest_report_header"]
