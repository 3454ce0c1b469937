# jaxlora for hosts with NVIDIA GPUs. CUDA, cuDNN and NCCL come as Python packages with
# jax[cuda13], so the base image needs no CUDA; the host needs a driver for CUDA 13 and
# the NVIDIA Container Toolkit:
#
#     docker build -t jaxlora .
#     docker run --rm --gpus all -v "$PWD:/work" -v jaxlora:/cache jaxlora train run.yaml
FROM python:3.12-slim-bookworm

# The Triton kernels compile a launcher with gcc on first use.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

COPY . /source
RUN pip install --no-cache-dir "/source[cuda,datasets,gguf]" && rm -r /source

# Models of the hub, compiled programs, and tokens of data (below jaxlora/); mount a
# volume to keep them.
ENV HF_HOME=/cache/huggingface \
    JAX_COMPILATION_CACHE_DIR=/cache/xla \
    XDG_CACHE_HOME=/cache
VOLUME /cache
WORKDIR /work
ENTRYPOINT ["jaxlora"]
CMD ["--help"]
