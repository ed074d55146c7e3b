# docker build -t draftgraph .
# docker run -p 8000:8000 -e DRAFTGRAPH_API_KEYS=a-long-random-key -v draftgraph:/cache draftgraph
#
# On a GPU, from an image with CUDA and torch 2.11 or later:
# docker build -t draftgraph --build-arg BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime .
# docker run --gpus all -p 8000:8000 -e DRAFTGRAPH_API_KEYS=a-long-random-key -v draftgraph:/cache draftgraph TARGET

ARG BASE=python:3.12-slim
FROM ${BASE}

WORKDIR /app
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY draftgraph draftgraph
RUN pip install --no-cache-dir ".[serve]" && rm -rf /app/*

# Models, what was measured and what was compiled outlive the container here.
ENV DRAFTGRAPH_CACHE=/cache HF_HOME=/cache/huggingface
RUN useradd --create-home draftgraph && mkdir /cache && chown draftgraph /cache
USER draftgraph
VOLUME /cache
EXPOSE 8000

HEALTHCHECK --start-period=5m CMD \
    ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/ready', timeout=5)"]
ENTRYPOINT ["draftgraph", "serve", "--host", "0.0.0.0"]
