"""The two ways in which work is turned down."""


class UserError(Exception):
    """The build cannot go on. The message is one clear sentence for a person: what is wrong, the
    two values that differ, and the command or edit that helps. Scripts print it without a traceback
    and exit with 1."""


class Reject(Exception):
    """One row cannot be used. `reason` is a short snake_case name that is counted; `detail` is for
    the rejects file."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail
