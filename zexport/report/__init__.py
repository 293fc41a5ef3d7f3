"""What users see: every result once as text for people and once as JSON for programs.

The JSON functions need nothing but the standard library; rich is imported where text is printed.
"""

from __future__ import annotations

from zexport.report.export import export_json, print_export, print_verify, verify_json
from zexport.report.failure import error_json
from zexport.report.inspect import inspection_json, print_inspection
from zexport.report.plan import plan_json, print_plan

__all__ = [
    "error_json",
    "export_json",
    "inspection_json",
    "plan_json",
    "print_export",
    "print_inspection",
    "print_plan",
    "print_verify",
    "verify_json",
]
