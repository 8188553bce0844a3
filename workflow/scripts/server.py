"""server: the SGLang server by hand. `warm` starts it for the build that calls this; `run` holds it
until Ctrl-C."""

import _path  # noqa: F401, I001  (first: see there)
import argparse
import sys
import time
from pathlib import Path

from eagle3.core import params
from eagle3.serving import server
from eagle3.core.errors import UserError
from eagle3.target.model import Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["warm", "run", "stop"])
    parser.add_argument("--params", default="params.yaml")
    parser.add_argument("--target", type=Path, default=Path("data/target"))
    arguments = parser.parse_args()

    def log(text: str) -> None:
        print(f"server: {text}", file=sys.stderr, flush=True)

    try:
        content = params.load(arguments.params)
        if arguments.action == "stop":
            server.stop(log)
        elif arguments.action == "warm":
            if content.generate.engine == "sglang":
                server.warm(content.server, Target(arguments.target), log)
        else:
            with server.lease(content.server, Target(arguments.target), log=log) as lease:
                log(f"ready at {', '.join(lease.urls)}; Ctrl-C stops it")
                while all(lease.state(url) for url in lease.urls):
                    time.sleep(1)
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
