"""Starts a thread on import, which no zygote survives."""

from __future__ import annotations

import threading
import time

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
