
# In the manner of the cells: what compiles, what installs, and a runtime stage that takes from both.
FROM nvcc AS small-compile
WORKDIR /small
COPY small /small
RUN gcc -shared -fPIC -O2 -g -o libanswer.so answer.c \
 && /opt/cuda/bin/nvcc -shared -Xcompiler -fPIC -gencode arch=compute_90,code=sm_90 -o libkernels.so device.cu \
 && strip --strip-unneeded libanswer.so libkernels.so

FROM toolchain AS small-wheels
COPY images/locks/llama-source-backend.txt /locks/
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    if [ -s /run/ca.crt ]; then export PIP_CERT=/run/ca.crt; fi \
 && pip install --no-cache-dir --no-compile --require-hashes --only-binary :all: \
      --target /opt/small/lib -r /locks/llama-source-backend.txt \
 && find /opt/small/lib -depth -type d -name __pycache__ -exec rm -rf {} + \
 && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/small/lib

FROM base AS small-runtime
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /var/cache/ldconfig/aux-cache \
      /var/cache/debconf/*-old /var/lib/dpkg/*-old /tmp/* \
 && find /var/log -type f -delete
COPY --from=small-wheels /opt/small/lib /opt/small/lib
COPY --from=small-compile /small/libanswer.so /small/libkernels.so /opt/small/
