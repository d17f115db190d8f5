// The same instance as in scale.cu, from another file.
template <typename T, int N> __global__ void scale(T *data, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] *= T(N);
}
template __global__ void scale<float, 2>(float *, int);
