"""Passwords, keys and tokens in params.yaml: from there they would go into logs, artifacts and the
list of processes, so none is accepted."""

import re

NAME = re.compile(
    r"(?:^|[-_])(?:token|key|apikey|pass|passphrase|credentials?|auth)$|secret|password|passwd",
    re.IGNORECASE,
)
VALUE = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|AKIA)[A-Za-z0-9_-]{16,}|://[^/@\s]+@")


def is_secret(name: str, value: object) -> bool:
    """Whether a setting looks like a password, a key or a token, by its name or by its value."""
    if value is None or isinstance(value, bool) or value == "":
        return False
    return bool(NAME.search(name.lstrip("-")) or VALUE.search(str(value)))


def problem_of(server) -> str:
    """Why the section `server` of params.yaml cannot be used: the first secret in it, by its name,
    and what to do instead; "" if there is none."""
    for number, url in enumerate(server.endpoints):
        if VALUE.search(url):
            return (
                f"endpoints.{number} holds a password, which logs and messages would repeat; name "
                "the variable that holds the key in server.api_key_env"
            )
    for name, value in server.environment.items():
        if is_secret(name, value):
            return (
                f"environment.{name} is a secret, which files of the build would repeat; remove it "
                f"and export {name}=… in the shell that runs the build: the server inherits its "
                "variables"
            )
    words = [part for word in server.command or [] for part in word.split("=", 1)]
    following = [*words[1:], ""]
    named = [(word, after) for word, after in zip(words, following) if word.startswith("-")]
    for where, pairs in (
        ("flags", server.flags.items()),
        ("command", [*named, *(("", w) for w in words)]),
    ):
        for name, value in pairs:
            if is_secret(name, value):
                return (
                    f"{where} holds a secret{f' ({name})' if name else ''}, which logs and the "
                    "list of processes would show; a server that is started here needs none. For "
                    "one that does, start it yourself, and name it in server.endpoints and the "
                    "variable that holds its key in server.api_key_env"
                )
    return ""
