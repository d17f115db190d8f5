
# A folder as NVIDIA's devel image of CUDA 12.8 has it, of what others carry: Debian's nvcc 12.4 with its headers, and the
# libraries of 12.8.1 from wheels, which also run what an older 12 compiled. Not that release's compiler: no SM above 90.
# The headers were patched for trixie's C library, and go to bookworm, whose older one does not compile with that patch.
FROM nvcc AS laid-out
COPY images/locks/cuda-12.8-libraries.txt /locks/
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    if [ -s /run/ca.crt ]; then export PIP_CERT=/run/ca.crt; fi \
 && pip install --no-cache-dir --no-compile --require-hashes --only-binary :all: --break-system-packages \
      --target /wheels -r /locks/cuda-12.8-libraries.txt
RUN home=/usr/local/cuda-12.8 && lib=$home/targets/x86_64-linux/lib \
 && mkdir -p $home/bin $home/nvvm/bin $home/nvvm/libdevice $home/include "$lib" \
 && cp -r /usr/lib/nvidia-cuda-toolkit/bin/nvcc /usr/lib/nvidia-cuda-toolkit/bin/crt \
      /usr/bin/bin2c /usr/bin/cudafe++ /usr/bin/fatbinary /usr/bin/nvlink /usr/bin/ptxas $home/bin/ \
 && cp /usr/lib/nvidia-cuda-toolkit/bin/cicc $home/nvvm/bin/ \
 && cp /usr/lib/nvidia-cuda-toolkit/libdevice/* $home/nvvm/libdevice/ \
 && printf '%s\n' 'TOP = $(_HERE_)/..' 'NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice' \
      'PATH += $(TOP)/nvvm/bin:$(_HERE_):' 'INCLUDES += "-I$(TOP)/include" $(_SPACE_)' \
      'LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64/stubs" "-L$(TOP)/lib64"' > $home/bin/nvcc.profile \
 && dpkg-query -L libcu++-dev libcub-dev libthrust-dev nvidia-cuda-dev | grep '^/usr/include/' \
      | while read -r path; do if [ -f "$path" ]; then echo "${path#/usr/include/}"; fi; done \
      | tar -C /usr/include --create --dereference --files-from - | tar -C $home/include --extract \
 && patch --reverse $home/include/crt/math_functions.h /build/cuda-12.4-glibc-2.41.patch \
 && cp -L /wheels/nvidia/*/lib/lib*.so.* "$lib/" \
 && cp -L /usr/lib/x86_64-linux-gnu/libcudadevrt.a /usr/lib/x86_64-linux-gnu/libcudart_static.a "$lib/" \
 && for name in cudart cublas cublasLt nvrtc; do ln -s lib$name.so.12 "$lib/lib$name.so"; done \
 && ln -s targets/x86_64-linux/lib $home/lib64 \
 && { echo 'Debian: nvidia-cuda-toolkit, files of nvcc and headers'; cat /usr/share/doc/nvidia-cuda-toolkit/copyright; \
      find /wheels -ipath '*.dist-info/*license*' -type f | sort | xargs cat; } > /NGC-DL-CONTAINER-LICENSE

FROM scratch
COPY --from=laid-out /usr/local/cuda-12.8 /usr/local/cuda-12.8
COPY --from=laid-out /NGC-DL-CONTAINER-LICENSE /
LABEL io.appliance.toolkit="Debian's nvcc 12.4.131 and headers, NVIDIA's wheels of CUDA 12.8.1's libraries"
