# lmforge in a container. These images were never built where lmforge is tested: only this file is checked, by a linter.
#
#   docker build --target cpu -t lmforge:cpu .
#   docker build --target cuda -t lmforge:cuda .
#   docker run --rm -v "$PWD":/work lmforge:cpu quickstart
#   docker run --rm --gpus all --ipc host -v "$PWD":/work lmforge:cuda pretrain recipe.toml
#
# The wheels of torch for CUDA bring its libraries along; the host needs NVIDIA's driver and container toolkit. --ipc host gives
# ranks the shared memory that they exchange data through.
FROM python:3.11-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# torch.compile needs a compiler; Python's headers are in the image. Debian's versions change with its security updates.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 lmforge
COPY . /src
WORKDIR /src

FROM base AS cpu
RUN pip install --constraint constraints.txt --index-url https://download.pytorch.org/whl/cpu torch \
    && pip install --constraint constraints.txt '.[serve]'
USER 1000
WORKDIR /work
ENTRYPOINT ["lmforge"]

FROM base AS cuda
RUN pip install --constraint constraints.txt '.[serve,top]'
USER 1000
WORKDIR /work
ENTRYPOINT ["lmforge"]
