
# One library for each target, and libraries with a planted fault. Debian's nvcc is on the path, a wheel's is not.
FROM nvcc AS gate-compile
ENV PATH=/opt/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
WORKDIR /small
COPY small /small
RUN mkdir /out /fault \
 && echo @TARGETS@ | xargs -n 1 -P 2 sh -c 'nvcc -shared -Xcompiler -fPIC -o /out/libsm$0.so \
      -gencode arch=compute_$0,code=sm_$0 scale.cu device.cu sum.cu'
RUN nvcc -c -o /out/ptx_only.o -gencode arch=compute_80,code=compute_80 sum.cu \
 && nvcc -c -o /out/beside.o -arch=sm_90 sum.cu \
 && nvcc -c -Xcompiler -fPIC -o /fault/scale.o -gencode arch=compute_90,code=sm_90 scale.cu \
 && nvcc -c -Xcompiler -fPIC -o /fault/sum.o -gencode arch=compute_80,code=sm_80 sum.cu \
 && nvcc -c -Xcompiler -fPIC -o /fault/again.o -gencode arch=compute_80,code=compute_80 scale_again.cu \
 && nvcc -shared -arch=sm_90 -o /out/libmixed.so /fault/scale.o /fault/sum.o \
 && nvcc -shared -arch=sm_90 -o /out/libshared.so /fault/scale.o /fault/again.o \
 && gcc -shared -fPIC -o /out/libplain.so answer.c

FROM scratch AS gate
COPY --from=gate-compile /out /
