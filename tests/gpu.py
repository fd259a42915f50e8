"""Which tests need a GPU?"""

from __future__ import annotations

import pytest
import torch

__all__ = ["needs_gpu"]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
