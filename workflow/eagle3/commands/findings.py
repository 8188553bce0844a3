"""What the doctor says of one thing that it looked at."""

from dataclasses import dataclass

BAD, WARNING, GOOD = "wrong", "look", "fine"


@dataclass(frozen=True)
class Finding:
    """`verdict` of one examination: wrong (it will not work), look (it may not), fine. `remedy` is
    empty if fine."""

    subject: str
    verdict: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:5}  {self.subject}: {self.reason}" + (
            f"\n       -> {self.remedy}" if self.remedy else ""
        )
