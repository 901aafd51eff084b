"""Packaging of longhaul: the learner's needs are the core, an actor's the `actor` extra, a whole site's `edge`."""

from setuptools import find_packages, setup

CORE = [
    "absl-py>=2.1",
    "cryptography>=42",
    "flax>=0.10.4",
    "grpcio>=1.62",
    "jax>=0.4.34",
    "matplotlib>=3.8",
    "ml_collections>=1.0",
    "numpy>=1.26",
    "optax>=0.2.5",
    "orbax-checkpoint>=0.6",
    "prometheus_client>=0.20",
    "protobuf>=4.25",
    "rich>=13",
    "scipy>=1.11",
    "tensorboardX>=2.6.2",
    "zstandard>=0.22",
]
# Reverb's last wheel is binary-coupled to TensorFlow 2.15, and through it to NumPy 1 and,
# by way of ml-dtypes, to jax 0.4.34 (BUILD.md, "Two environments").
ACTOR = ["gymnasium>=1.1"]
EDGE = [
    *ACTOR,
    "dm-reverb==0.14.0",
    "tensorflow-cpu==2.15.1",
    "jax==0.4.34",
    "flax==0.10.4",
    "optax==0.2.5",
    "numpy==1.26.4",
]
ATARI = ["ale-py>=0.10", "opencv-python-headless<4.12"]
BOX2D = ["box2d==2.3.10", "pygame>=2.5"]
MINATAR = ["minatar==1.0.15"]
TEST = ["pytest>=8", "pytest-timeout>=2.3"]
# grpcio-tools of the protobuf 4 generation, so that the generated code also loads beside TensorFlow 2.15.
DEV = TEST + ["grpcio-tools>=1.62,<1.63", "mypy>=1.10", "ruff>=0.5"]

setup(
    name="longhaul",
    version="0.1.0",
    description="DQN whose replay stays with the actors and whose learner sits across a long-haul link",
    python_requires=">=3.11,<3.12",
    packages=find_packages(include=["longhaul", "longhaul.*", "launchers", "launchers.*", "configs"]),
    package_data={"longhaul.proto": ["*.proto", "*.pyi"]},
    install_requires=CORE,
    extras_require={
        "actor": ACTOR,
        "edge": EDGE,
        "atari": ATARI,
        "box2d": BOX2D,
        "minatar": MINATAR,
        "all": EDGE + ATARI + BOX2D + MINATAR,
        "test": TEST,
        "dev": DEV,
    },
)
