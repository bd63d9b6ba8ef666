"""structlog without rich. Import it from here.

structlog imports rich wherever that is installed, to draw tracebacks that our logs do not have. It is a tenth of all
imports of a service, and whoever waits for a process that starts again waits for them.
"""

from __future__ import annotations

import sys
from typing import Any, Final, cast

_NAME: Final = "rich"

if _NAME in sys.modules:
    import structlog
else:
    cast("dict[str, Any]", sys.modules)[_NAME] = None  # an import fails, as where it is not installed
    try:
        import structlog
    finally:
        del sys.modules[_NAME]

__all__ = ["structlog"]
