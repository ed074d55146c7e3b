# docker build -t draftgraph .
# docker run -p 8000:8000 -e DRAFTGRAPH_API_KEYS=a-long-random-key -v draftgraph:/cache draftgraph
#
# On a GPU, from an image with CUDA and torch 2.11 or later:
# docker build -t draftgraph --build-arg BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime .
# docker run --gpus all -p 8000:8000 -e DRAFTGRAPH_API_KEYS=a-long-random-key -v draftgraph:/cache draftgraph TARGET

ARG BASE=python:3.12-slim
FROM ${BASE}

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY draftgraph draftgraph
# Which Triton it needs torch says. A base that brings torch keeps it, and gets what Triton compiles with when it runs.
RUN sed -i '/^triton==/d' constraints.txt && \
    if python3 -c "import torch" 2>/dev/null; then \
        sed -i '/^torch==/d' constraints.txt && \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev && \
        rm -rf /var/lib/apt/lists/*; \
    fi && \
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir -c constraints.txt ".[serve,otel]" && \
    rm -rf /app/*

# Models, what was measured and what was compiled outlive the container here.
ENV DRAFTGRAPH_CACHE=/cache HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton
RUN useradd --uid 10001 --create-home draftgraph && mkdir /cache && chown 10001:10001 /cache
USER 10001:10001
VOLUME /cache

# Another port: -e PORT=9000, which the health check reads too.
ENV PORT=8000
EXPOSE ${PORT}
# docker stop waits for ten seconds; with --stop-timeout or terminationGracePeriodSeconds of more, give more.
ENV DRAFTGRAPH_GRACE=7

HEALTHCHECK --start-period=5m CMD ["python3", "-c", "import os, ssl, urllib.request as web; \
tls = 'DRAFTGRAPH_TLS_CERT' in os.environ; \
url = ('https' if tls else 'http') + '://127.0.0.1:' + os.environ['PORT'] + '/ready'; \
web.urlopen(url, timeout=5, context=ssl._create_unverified_context() if tls else None)"]
ENTRYPOINT ["sh", "-c", "exec draftgraph serve --host 0.0.0.0 --port \"$PORT\" \"$@\"", "serve"]
