"""Accelerators and models: figures of data sheets and model cards, each with its source.

Each row was compared in November 2026 with a second, public table, which its comment names: none
differed, and for the compute of the A10G none was found. Peaks are dense (half of a figure "with
sparsity"). Where a card has no unit for a precision, its peak is that of the next wider one:
weights are unpacked before they are multiplied.
"""

from dataclasses import dataclass

# int4 without its group scales, some 3 % more; nvfp4 with one FP8 scale for 16 numbers
BYTES_PER_ELEMENT = {
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "nvfp4": 0.5625,
}
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator. The factors, shares of its peaks that kernels reach, are assumptions."""

    name: str
    peak_flops_fp16: float
    peak_flops_fp8: float
    bandwidth_bytes_s: float
    memory_bytes: float
    link_bytes_s: float  # to its peers, one direction
    bandwidth_factor: float = 0.8
    compute_factor: float = 0.5

    def peak_flops(self, precision: str) -> float:
        """Return the peak; for 4-bit weights that of FP16, in which they are multiplied."""
        return self.peak_flops_fp8 if precision == "fp8" else self.peak_flops_fp16


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer, dense or with experts: its counts."""

    name: str
    parameters: float
    active_parameters: float  # used by one token
    layers: int
    heads: int
    kv_heads: int
    head_size: int  # for latent attention the mean of the key's and the value's
    max_model_len: int
    hidden_size: int | None = None  # None: heads * head_size
    latent_elements: int | None = None  # per token and layer, of multi-head latent attention
    routed_parameters: float = 0.0  # of all routed experts of all layers
    experts: int = 0  # routed experts of a layer
    experts_per_token: int = 0

    @property
    def width(self) -> int:
        """Return the elements of a token's activation between layers."""
        return self.heads * self.head_size if self.hidden_size is None else self.hidden_size

    def kv_bytes_per_token(self, bytes_per_element: float = 2.0) -> float:
        """Return the size of the key and value of all layers and KV heads, or of the latents."""
        if self.latent_elements is not None:
            return self.layers * self.latent_elements * bytes_per_element
        return 2 * self.layers * self.kv_heads * self.head_size * bytes_per_element

    def kv_copies(self, tensor_parallel: int) -> float:
        latent = self.latent_elements is not None
        return kv_copies(None if latent else self.kv_heads, tensor_parallel)


def kv_copies(kv_heads: int | None, tensor_parallel: int) -> float:
    """Return how often each KV entry is kept.

    KV heads are divided over the devices and repeated beyond their number; a latent vector (None)
    is on each of them.
    """
    return tensor_parallel / min(kv_heads or 1, tensor_parallel)


# NVIDIA A100 80 GB SXM data sheet (2021): 312 TFLOPS FP16, no FP8 unit, 2,039 GB/s, NVLink 600
# GB/s both ways. glennklockwood.com, A100; thundercompute.com, A100 specifications.
A100_80 = Hardware("A100-80", 312e12, 312e12, 2.039e12, 80 * GIB, 300e9)
# The same data sheet and pages, 40 GB card: 1,555 GB/s.
A100_40 = Hardware("A100-40", 312e12, 312e12, 1.555e12, 40 * GIB, 300e9)
# NVIDIA H100 SXM data sheet (2023): 989 TFLOPS FP16, 1,979 FP8, 3.35 TB/s, NVLink 900 GB/s both
# ways. glennklockwood.com, H100 (989.4, 1,978.9).
H100 = Hardware("H100", 989.4e12, 1978.9e12, 3.35e12, 80 * GIB, 450e9)
# NVIDIA H200 data sheet (2024): compute and NVLink of the H100, 4.8 TB/s, 141 GB (140 GiB shown
# by the driver). github.com/alpharomercoma/MI300X-vs-H200, METHODOLOGY.md.
H200 = Hardware("H200", 989.4e12, 1978.9e12, 4.8e12, 140 * GIB, 450e9)
# NVIDIA HGX B200 data sheet (2024), per card at 1,000 W: 2.25 PFLOPS FP16, 4.5 FP8, 8 TB/s,
# 180 GB (179 GiB shown by the driver), NVLink 1.8 TB/s both ways. glennklockwood.com, B200;
# docs.vultr.com, HGX B200 hardware overview (179 GB, 8 TB/s).
B200 = Hardware("B200", 2250e12, 4500e12, 8.0e12, 179 * GIB, 900e9)
# AMD Instinct MI300X data sheet (2023): 1,307.4 TFLOPS FP16, 2,614.9 FP8, 5.3 TB/s, 192 GB,
# seven Infinity Fabric links of 128 GB/s both ways. MI300X-vs-H200, as above.
MI300X = Hardware("MI300X", 1307.4e12, 2614.9e12, 5.3e12, 192 * GIB, 448e9)
# NVIDIA L4 data sheet (2023): 121 TFLOPS FP16, 242.5 FP8, 300 GB/s, 24 GB (22.5 GiB with ECC),
# PCIe 4.0 x16. grokipedia.com, L4 vs L40S (242 and 485 with sparsity).
L4 = Hardware("L4", 121e12, 242.5e12, 0.3e12, 22.5 * GIB, 32e9)
# NVIDIA L40S data sheet (2023): 362 TFLOPS FP16, 733 FP8, 864 GB/s, 48 GB (45 GiB with ECC),
# PCIe 4.0 x16. mullet.se, L40 and L40S (362.05, 733).
L40S = Hardware("L40S", 362e12, 733e12, 0.864e12, 45 * GIB, 32e9)
# NVIDIA A10 data sheet (2021) for the A10G's memory: 600 GB/s, 24 GB (22.5 GiB with ECC), no FP8
# unit; AWS G5 page (2021) for its compute: 70 TFLOPS FP16 (35 FP32).
# baseten.co, A10 vs A10G, for the memory.
A10G = Hardware("A10G", 70e12, 70e12, 0.6e12, 22.5 * GIB, 32e9)
# NVIDIA T4 data sheet (2019): 65 TFLOPS FP16, no FP8 unit, 320 GB/s, 16 GB (15 GiB with ECC),
# PCIe 3.0 x16. sysrqmts.com, Tesla T4 (65.13, 320.0 GB/s).
T4 = Hardware("T4", 65e12, 65e12, 0.32e12, 15 * GIB, 16e9)

CARDS = (A100_40, A100_80, H100, H200, B200, MI300X, L40S, L4, A10G, T4)
HARDWARE = {card.name.lower(): card for card in CARDS}

# Meta, "The Llama 3 Herd of Models" (2024), table 3, and the models' config.json.
LLAMA3_8B = Model("llama3-8b", 8.03e9, 8.03e9, 32, 32, 8, 128, 8192)
LLAMA3_70B = Model("llama3-70b", 70.6e9, 70.6e9, 80, 64, 8, 128, 8192)
# Qwen2.5 technical report (2024), table 1, and the model's config.json.
QWEN25_1_5B = Model("qwen2.5-1.5b", 1.54e9, 1.54e9, 28, 12, 2, 128, 32768)
# Qwen3 technical report (2025), table 1, and the models' config.json (32B: hidden size 5120
# under 64 heads of 128).
QWEN3_8B = Model("qwen3-8b", 8.2e9, 8.2e9, 36, 32, 8, 128, 40960)
QWEN3_32B = Model("qwen3-32b", 32.8e9, 32.8e9, 64, 64, 8, 128, 40960, hidden_size=5120)
# DeepSeek-V3 technical report (2024), section 4.2, and its config.json: 671 G parameters, 37 G
# active; 58 of 61
# layers have 256 routed experts of 3 x 7168 x 2048 parameters, 8 a token; latent of 512 + 64
# elements;
# 128 heads with keys of 192 and values of 128.
DEEPSEEK_V3 = Model(
    "deepseek-v3",
    parameters=671e9,
    active_parameters=37e9,
    layers=61,
    heads=128,
    kv_heads=128,
    head_size=160,
    max_model_len=163840,
    hidden_size=7168,
    latent_elements=576,
    routed_parameters=58 * 256 * 3 * 7168 * 2048.0,
    experts=256,
    experts_per_token=8,
)

MODELS = {
    model.name: model
    for model in (LLAMA3_8B, LLAMA3_70B, QWEN25_1_5B, QWEN3_8B, QWEN3_32B, DEEPSEEK_V3)
}
