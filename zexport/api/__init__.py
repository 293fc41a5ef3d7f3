"""The public functions that do work: plan an export, run, verify or compare it, or all in one.

Nothing here prints or exits; progress goes to a callback, and errors are ``ZexportError``.
"""
