"""Packed LoRA products for JAX: a frozen matrix product with its adapters, for many jobs at once."""

from .ahead import compile_lowered as compile_lowered
from .api import GATED as GATED
from .api import SHRUNK as SHRUNK
from .api import lora_delta as lora_delta
from .api import lora_dense as lora_dense
from .api import lora_dense_group as lora_dense_group
from .api import lora_mlp as lora_mlp
from .choice import Choice as Choice
from .choice import Device as Device
from .choice import by_default as by_default
from .choice import choose as choose
from .choice import choose_head as choose_head
from .choice import default_device as default_device
from .choice import using as using
from .fp8 import Fp8Weight as Fp8Weight
from .fp8 import quantise as quantise
from .fp8 import quantise_weight as quantise_weight
