"""Rules that map lines of llama.cpp's log to the error of an ending. A source is a file of the pinned tree
(llama_cpp_python 0.3.36, vendor/llama.cpp) with the function that prints the line; tests/endings holds each line."""

from __future__ import annotations

from appliance.engines.endings import HOST_RULES, LAST_LINES, LINKER_RULES, MORE, OTHER_GPU, REBUILD, Rule, rule
from appliance.errors import (
    CpuBackendError,
    EngineArgumentsError,
    EngineGpuMemoryError,
    EngineHostMemoryError,
    EngineNotReadyError,
    GpuUnusableError,
    ModelUnreadableError,
    NoKernelError,
)

_LESS = "use a smaller --ctx-size or --gpu-layers, a larger --n-cpu-moe, or free the GPU's memory"
_SEE_PLAN = "see `appliance plan --dry-run` for the command line"
_FETCH = "the file is damaged or was not fetched whole: `appliance models verify` checks the volume; fetch it again"
_FOREIGN = (
    "the file seems to be made for another program's engine: take an upload made by llama.cpp's converter, or a newer "
    "image if the model is new"
)
_TOO_OLD = (
    "this image's engine is too old for the model, or the file is no language model: use a newer image or another model"
)

# Rules are tried from the top, the most specific first.
RULES: tuple[Rule, ...] = (
    *LINKER_RULES,
    rule(
        "no CPU backend",
        CpuBackendError,
        REBUILD,
        r"no backends are loaded|no CPU backend found|CPU backend is not loaded|failed to initialize CPU backend",
        source="src/llama.cpp llama_model_load_from_file_impl; src/llama-model.cpp; src/llama-context.cpp; "
        "src/llama-adapter.cpp",
    ),
    rule(
        "no such GPU",
        GpuUnusableError,
        f"the engine does not find the GPU that the plan uses: {OTHER_GPU}",
        r"invalid device: CUDA\d",
        source="common/arg.cpp parse_device_list; a backend that does not load says nothing (ggml-backend-reg.cpp)",
    ),
    rule(
        "slots without room",
        EngineGpuMemoryError,
        "use --moe-slots off, fewer slots, or a smaller --ctx-size",
        r"--moe-slots \d+: \S+ has no memory left",
        source="images/patches/llama-moe-split.patch llama_moe_split::allocate",
    ),
    rule(
        "refused slots",
        EngineArgumentsError,
        "use --moe-slots off, and see `appliance plan --explain`",
        r"--moe-(?:slots|rates|trace)[^:]*: ",
        source="images/patches/llama-moe-split.patch llama_moe_split, find_layers",
    ),
    rule(
        "refused arguments",
        EngineArgumentsError,
        _SEE_PLAN,
        # With the colon, because the kernel's words for failed reads include "Invalid argument" too.
        r"error: invalid argument: |unknown argument|error while handling argument|[Uu]nsupported cache type"
        r"|error: invalid parameter for argument: ",
        source="common/arg.cpp common_params_parse_ex",
    ),
    rule(
        "unreadable chat template",
        EngineArgumentsError,
        "the chat template is not valid Jinja: correct the file of --chat-template-file, or set another file there",
        r"the supplied chat template is not supported|chat template parsing error: ",
        source="common/arg.cpp; tools/server/server-context.cpp init",
    ),
    rule(
        "refused context",
        EngineArgumentsError,
        "the model or this GPU does not support a setting: leave --kv-type and --split-mode to the plan, and see "
        "`appliance plan --explain`",
        r"quantized V cache (?:requires|was requested, but this requires)",
        r"cache type \S+ with block size \d+ does not divide|does not support different K \(",
        r"SPLIT_MODE_TENSOR (?:requires|needs|not implemented)|does not support split buffers",
        r"invalid value for main_gpu|n_seq_max must be <=",
        source="src/llama-context.cpp llama_init_from_model, llama_context; src/llama.cpp "
        "llama_prepare_model_devices; src/llama-model.cpp llama_model_create, make_gpu_buft_list",
    ),
    rule(
        "no kernels",
        NoKernelError,
        "use an image that was built for this GPU's architecture; `appliance probe` shows it",
        r"has no device code compatible with CUDA arch",
        source="ggml/src/ggml-cuda/common.cuh no_device_code",
    ),
    rule(
        "not for this GPU",
        EngineArgumentsError,
        "the engine has no kernel for this quantization or KV cache type on this GPU: use a model in another "
        "quantization, or leave --kv-type to the plan",
        r"\.cuh?:\d+: (?:.*[Uu]nsupported|doesn't support|.* only supported on|Only support )",
        r"op not supported \S+ \(\w+\)|in a buffer \(\S+\) that cannot run the operation",
        source="GGML_ABORT in ggml/src/ggml-cuda (mmvf.cu, mmf.cu, getrows.cu, set-rows.cu, cpy.cu, fattn.cu, "
        "ssm-scan.cu); ggml-cuda.cu ggml_cuda_graph_evaluate_and_capture; ggml-backend.cpp "
        "ggml_backend_sched_backend_id_from_cur",
    ),
    rule(
        "GPU cannot be used",
        GpuUnusableError,
        OTHER_GPU,
        # cudaMalloc also fails if a GPU is busy or broken; that is not a lack of memory.
        r"failed to initialize CUDA: |cudaMalloc failed: (?!out of memory)",
        source="ggml/src/ggml-cuda/ggml-cuda.cu ggml_cuda_init, ggml_backend_cuda_buffer_type_alloc_buffer",
    ),
    rule(
        "cuBLAS without room",
        EngineNotReadyError,
        "cuBLAS found no free memory on the GPU, or the driver failed: set a larger --reserve-mib, and check "
        f"`nvidia-smi`; {LAST_LINES}",
        r"CUDA error: (?:the resource allocation failed|the library was not initialized)",
        source="ggml/src/ggml-cuda/ggml-cuda.cu ggml_cuda_error, with cublasGetStatusString (common.cuh CUBLAS_CHECK)",
    ),
    *HOST_RULES,
    rule(
        "out of GPU memory",
        EngineGpuMemoryError,
        _LESS,
        # Not CUDA_Host, which is pinned host memory.
        r"cudaMalloc failed: out of memory|CUDA error: out of memory",
        r"(?i)(?:failed|unable) to allocate CUDA\d+ buffer",
        source="ggml/src/ggml-cuda/ggml-cuda.cu ggml_backend_cuda_buffer_type_alloc_buffer, ggml_cuda_error; "
        "ggml/src/ggml-alloc.c ggml_gallocr_reserve_n_impl, alloc_tensor_range; src/llama-model.cpp load_tensors",
    ),
    rule(
        "out of host memory",
        EngineHostMemoryError,
        MORE,
        r"(?i)insufficient memory \(attempted to allocate|std::bad_alloc|(?:failed|unable) to allocate"
        r"|cannot allocate memory|\bout of memory\b",
        source="ggml/src/ggml.c ggml_aligned_malloc; ggml/src/ggml-backend.cpp "
        "ggml_backend_cpu_buffer_type_alloc_buffer; src/llama-kv-cache.cpp; glibc strerror(ENOMEM)",
    ),
    rule(
        "LoRA adapter of another model",
        ModelUnreadableError,
        "the LoRA adapter is of another model or damaged: use one that was trained on this model, or take --lora out",
        r"failed to apply lora adapter: ",
        source="src/llama-adapter.cpp llama_adapter_lora_init_from_file_ptr",
    ),
    rule(
        "control vector of another model",
        ModelUnreadableError,
        "the control vector is of another model: take it out of --engine-arg",
        r"control vector n_embd does not match model|control vectors? .*does not match previous dimensions",
        source="src/llama-adapter.cpp llama_adapter_cvec::apply; common/common.cpp common_control_vector_load",
    ),
    rule(
        "projector of another model",
        ModelUnreadableError,
        "the projector is of another model: use the one that was published with this model, or --mmproj off",
        r"mismatch between (?:text model|vision and audio)|you may be using wrong mmproj",
        source="tools/mtmd/mtmd.cpp mtmd_context",
    ),
    rule(
        "unreadable projector",
        ModelUnreadableError,
        "the projector is damaged or too new for this engine: fetch it again, use a newer image, or --mmproj off",
        r"clip_init: failed to load model '.*': .*(?:projector type|[Kk]ey (?:not found|')|tensor|ggml context"
        r"|failed to open|does this file exist|out of range|must be)",
        r"(?i)\bunknown (?:vision )?projector type",
        source="tools/mtmd/clip.cpp clip_init, clip_model_loader",
    ),
    rule(
        "draft model of another model",
        ModelUnreadableError,
        "the draft model is of another model: use one of the same family, or take --draft-model out",
        r"EAGLE3: target layer id \d+ exceeds target n_layer",
        source="common/speculative.cpp common_speculative_impl_draft_eagle3",
    ),
    rule(
        "projector given as a model",
        ModelUnreadableError,
        "the file is a projector: give the language model as --model and this one as --mmproj",
        r"CLIP cannot be used as main model|CLIP is a quant-only stub|CLIP has no inference graph",
        source="src/llama.cpp llama_model_load; src/models/clip.cpp",
    ),
    rule(
        "part of a model",
        ModelUnreadableError,
        "the model is in several files: put all parts into one folder, with their names, and name the first one",
        r"invalid split (?:file|count)|illegal split file idx|failed to load GGUF split|missing key \S+ in GGUF split",
        r"corrupted model: \d+ tensors expected but \d+ found|list of splits is empty",
        source="src/llama-model-loader.cpp llama_get_list_splits, llama_model_loader; src/llama.cpp",
    ),
    rule(
        "model cannot be opened",
        ModelUnreadableError,
        "make the file readable for the container's user or for group 0",
        r"failed to open (?!/proc)\S.*Permission denied",
        source="src/llama-mmap.cpp llama_file::impl; ggml/src/gguf.cpp gguf_init_from_file",
    ),
    rule(
        "disk failed",
        ModelUnreadableError,
        "the disk or the network volume failed while the model was read: `dmesg` on the host tells more",
        r"(?:read|seek) error: (?:Input/output error|Stale file handle|Remote I/O error)",
        source="src/llama-mmap.cpp llama_file::impl (strerror)",
    ),
    rule(
        "volume that maps no files",
        ModelUnreadableError,
        "the filesystem cannot map files into memory: use --load-mode none, or put the model on a local disk",
        r"mmap failed: (?:No such device|Operation not supported)",
        source="src/llama-mmap.cpp llama_mmap::impl (strerror of ENODEV, EOPNOTSUPP)",
    ),
    rule(
        "unknown to this engine",
        ModelUnreadableError,
        _TOO_OLD,
        r"un(?:known|supported) model architecture|unknown (?:pre-)?tokenizer|only supports up to version",
        r"has invalid ggml type \d+",
        source="src/llama-model.cpp llama_model_create; src/llama-vocab.cpp load; ggml/src/gguf.cpp",
    ),
    rule(
        "made for another engine",
        ModelUnreadableError,
        _FOREIGN,
        r"wrong number of tensors|too many tensors created|missing tensor |tensor '.*' not found|has wrong shape",
        r"key not found in model: |has wrong (?:type|array|array element type|array length)|invalid n_rot: ",
        r"cannot find tokenizer |is not a string/float32|exceeds max \d+|n > N_MAX|expected scalar, found array",
        r"GGUFv1 is no longer supported|does not support multimodal\. Please reconvert|convert without --no-mtp",
        r"invalid gguf type for |array bounds (?:for|in)|must be a bool array",
        source="src/llama-model-loader.cpp done_getting_tensors, create_tensor, check_tensor_dims, get_key, get_arr; "
        "src/llama-vocab.cpp load; src/llama-model.cpp; src/models/glm4.cpp; ggml/src/gguf.cpp",
    ),
    rule(
        "model missing or damaged",
        ModelUnreadableError,
        _FETCH,
        r"error loading model: |\bgguf_init_from_\w+: |found tensors with invalid data",
        source="src/llama.cpp llama_model_load; ggml/src/gguf.cpp; src/llama-model-loader.cpp load_all_data",
    ),
    rule(
        "address in use",
        EngineNotReadyError,
        "the engine's socket or port is in use, which is an error of the appliance: report it with the lines above",
        r"couldn't (?:bind HTTP server socket|start HTTP listener)",
        source="tools/server/server-http.cpp server_http_context::start",
    ),
    # Vague, because the engine then continues without speculative decoding (except with synthetic acceptance).
    rule(
        "draft model of another model",
        ModelUnreadableError,
        "the draft model is of another model: use one of the same family, or take --draft-model out",
        r"draft (?:model )?vocabs?\b.* (?:not compatible|must (?:closely )?match)|draft model \w+ tokens must match",
        r"failed to initialize speculative decoding context: draft model ",
        source="common/speculative.cpp common_speculative_impl_draft_simple; tools/server/server-context.cpp init",
        is_vague=True,
    ),
    # Vague, because a more specific line comes before these if the engine tells the reason.
    rule(
        "LoRA adapter does not load",
        ModelUnreadableError,
        "the LoRA adapter is of another model or damaged: use one that was trained on this model, or take --lora out",
        r"failed to load lora adapter '",
        source="common/common.cpp common_init_result",
        is_vague=True,
    ),
    rule(
        "projector does not load",
        ModelUnreadableError,
        "the projector is of another model, damaged or too new: use the one of this model, or --mmproj off",
        r"[Ff]ailed to load CLIP model from |failed to load multimodal model, '",
        source="tools/mtmd/mtmd.cpp mtmd_context; tools/server/server-context.cpp load_model",
        is_vague=True,
    ),
    rule(
        "draft model does not load",
        ModelUnreadableError,
        "the draft model is of another model or damaged: use one of the same family, or take --draft-model out",
        r"failed to load draft model, '",
        source="tools/server/server-context.cpp load_model; common/speculative.cpp common_speculative_init_from_params",
        is_vague=True,
    ),
    rule(
        "failed check of the engine",
        EngineNotReadyError,
        f"a check inside the engine failed: another upload of the model or a newer image may help; {LAST_LINES}",
        r"GGML_ASSERT\(",
        source="ggml/include/ggml.h GGML_ASSERT",
        is_vague=True,
    ),
)
