"""gRPC and etcd's generated messages, imported quietly, in one place.

The messages and stubs come from `etcd-sdk-python` (imports as `pyetcd`), the living fork of `etcd3`, whose
own release does not import with protobuf >= 4. Only its generated code is used: its client keeps a node that
failed once out of use for 300 s, waits without a limit for a watch to be created, is not safe for threads,
and drops the text of an error.
"""

from __future__ import annotations

import os
from typing import Any

from deadpool.errors import IntegrationError

# gRPC reads these once, when it is loaded, and has no other switch. It writes to stderr what it also raises,
# and talks about every fork() of the process. They are set for the import only; what the user has set stays.
_QUIET = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}


def _import() -> tuple[Any, Any]:
    added = [name for name in _QUIET if name not in os.environ]
    os.environ.update({name: _QUIET[name] for name in added})
    try:
        import grpc  # type: ignore[import-untyped]  # no stubs are published with the package
        from pyetcd import etcdrpc  # without types too; pyproject.toml knows it
    except ImportError as error:
        raise IntegrationError(
            f"the etcd client cannot be imported ({error}). Remedy: pip install 'etcd-sdk-python' 'protobuf'"
        ) from error
    finally:
        for name in added:
            os.environ.pop(name, None)
    return grpc, etcdrpc


grpc: Any
etcdrpc: Any
grpc, etcdrpc = _import()
