"""Rules that map lines of vLLM's log to errors and hints.

Each source is a file in the wheel of vLLM 0.33.0, or of a library it contains; 0.32.0 prints the same lines.
tests/endings has an example line for each rule.
"""

from __future__ import annotations

from appliance.engines.endings import HOST_RULES, LAST_LINES, LINKER_RULES, MORE, OTHER_GPU, REBUILD, Rule, rule
from appliance.errors import (
    ConfigError,
    DriverTooOldError,
    EngineArgumentsError,
    EngineGpuMemoryError,
    EngineHostMemoryError,
    EngineLibraryError,
    EngineNotReadyError,
    GpuUnusableError,
    ModelUnreadableError,
    NoKernelError,
    VolumeError,
)

_LESS = "use a smaller --ctx-size or --parallel, or free the GPU's memory; `appliance probe` names who holds it"
_SEE_PLAN = "see `appliance plan --explain` for the command line and where each value comes from"
_FETCH = "fetch the model again; `appliance models list` shows what is on the volume"
_TOO_OLD = "this image's engine is too old for the model, or has no support for it: use a newer image or another model"
_OTHER_LAYOUT = (
    "the model's files do not hold what this engine reads: use the publisher's own upload, another quantization, or a "
    "newer image"
)
_OTHER_QUANTIZATION = (
    "this GPU does not compute the model's quantization: use a model in another quantization; `appliance plan "
    "--explain` says which this GPU computes"
)
_DRIVER_ANSWER = (
    "the driver does not answer in the container: restart the host after an update of the driver, create the container "
    "anew, and check `nvidia-smi`"
)
_GROUP = (
    "the engine's processes did not meet in time: look for the first error of each, and at the network between hosts; "
    f"{LAST_LINES}"
)

# One meaning in many wordings: this GPU does not support the way in which the model's weights are computed. A line has
# to match all three patterns.
_COMPUTED = (
    r"(?i)quanti[sz]|\bint[48]\b|\b(?:nv|mx|b)?fp[468]|\bw\d+a\d+|\bawq\b|\bgptq\b|\bmarlin\b|_mm(?:_|\b)|\bmm\b|\bMoE\b"
    r"|\bkernels?\b|linear layer"
)
_REFUSED = (
    r"(?i)not supported|unsupported|does not support|only supports?\b|is only supported|\brequires?\b|no compiled"
    r"|no .* MoE backend supports|failed to find a kernel"
)
_CHIP = (
    r"(?i)\bGPUs?\b|\barchitecture\b|\bSM_?\d|\bSM \d|capabilit|\bHopper|\bBlackwell|\bAmpere|\bAda\b|\bTuring"
    r"|\bplatform\b|deployment configuration|linear layer"
)

# Rules are tried from the top, so the more specific rules come first.
RULES: tuple[Rule, ...] = (
    *LINKER_RULES,
    rule(
        "code of the model needs packages",
        ModelUnreadableError,
        "the code in the model's folder needs packages that the image lacks: use another upload of the model",
        r"This modeling file requires the following packages",
        source="transformers dynamic_module_utils.py check_imports",
    ),
    rule(
        "package missing",
        EngineLibraryError,
        "the model or a setting needs a package that this image lacks: use another model, quantization or setting",
        (
            r"^(?:ImportError|ModuleNotFoundError): ",
            r"pip install|[Pp]lease install|(?:is|are) required|to be installed",
        ),
        source="model_executor/layers/quantization/torchao.py, quark; model_executor/models (timm); tokenizers",
    ),
    rule(
        "module missing",
        EngineLibraryError,
        REBUILD,
        r"^ModuleNotFoundError: |^ImportError: cannot import name |^AttributeError: .*module '[\w.]+' has no attribute",
        source="CPython Lib/importlib/_bootstrap.py, Python/ceval.c, Objects/moduleobject.c",
    ),
    rule(
        "refused arguments",
        EngineArgumentsError,
        _SEE_PLAN,
        r"^(?:vllm|main\.py)(?: \w+)?: error: ",
        source="CPython Lib/argparse.py ArgumentParser.error",
    ),
    rule(
        "driver too old",
        DriverTooOldError,
        "update the NVIDIA driver of the host, or use an image with an older CUDA release",
        r"NVIDIA driver on your system is too old",
        source="torch c10/cuda/CUDAFunctions.cpp device_count_impl",
    ),
    rule(
        "GPU too old for the compiler",
        NoKernelError,
        "this GPU is too old for the image's compiler: use an image that was made for it",
        r"too old to be supported by the triton GPU compiler",
        source="torch/_inductor/exc.py GPUTooOldForTriton",
    ),
    rule(
        "driver does not answer",
        GpuUnusableError,
        _DRIVER_ANSWER,
        r"NVMLError\w*: |Driver/library version mismatch|CUDA unknown error - |CUDA driver initialization failed",
        source="third_party/pynvml.py NVMLError; torch c10/cuda/CUDAFunctions.cpp device_count_impl",
    ),
    rule(
        "no device",
        GpuUnusableError,
        OTHER_GPU,
        r"Failed to infer device type|No CUDA GPUs are available|Found no NVIDIA driver on your system",
        source="config/device.py DeviceConfig; torch c10/cuda/CUDAFunctions.cpp device_count_ensure_non_zero",
    ),
    rule(
        "KV cache too small",
        EngineGpuMemoryError,
        "use a smaller --ctx-size, or leave it out: the longest context that fits is served then",
        r"To serve at least one request with the model's max seq len",
        source="v1/core/kv_cache_planning.py",
    ),
    rule(
        "no room for a KV cache",
        EngineGpuMemoryError,
        _LESS,
        r"No available memory for the cache blocks",
        source="v1/core/kv_cache_planning.py",
    ),
    rule(
        "less free than asked for",
        EngineGpuMemoryError,
        "another process holds this GPU's memory: `appliance probe` names it; free it, or set a larger --reserve-mib",
        r"Free memory on device .* on startup is less than |Externally held weights on device .* exceed ",
        source="v1/worker/utils.py request_memory",
    ),
    rule(
        "KV cache larger than the host's memory",
        EngineHostMemoryError,
        MORE,
        r"Available memory on node .* is less than requested memory|The worker already uses \S+ GiB .*of CPU memory",
        source="v1/worker/cpu_worker.py determine_available_memory",
    ),
    *HOST_RULES,
    rule(
        "out of GPU memory",
        EngineGpuMemoryError,
        _LESS,
        r"\b(?:CUDA|CUDART|[Cc]uda|cu[A-Z]\w+)\b.*\bout of memory\b|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        source="torch c10/cuda/CUDACachingAllocator.cpp, CUDAException.cpp; v1/worker/gpu_model_runner.py; NCCL",
    ),
    rule(
        "out of host memory",
        EngineHostMemoryError,
        MORE,
        r"DefaultCPUAllocator: can't allocate memory|\bCannot allocate memory\b|std::bad_alloc",
        r"^(?:[\w.]+\.)?_?(?:Array)?MemoryError(?::|$)",
        source="torch c10/core/impl/alloc_cpu.cpp; glibc strerror(ENOMEM); CPython; numpy _core/_exceptions.py",
    ),
    rule(
        "memory changed while it was measured",
        EngineNotReadyError,
        "another process freed memory of this GPU while the engine measured it: start again",
        r"Error in memory profiling",
        source="v1/worker/gpu_worker.py determine_available_memory",
    ),
    rule(
        "heads do not divide",
        EngineArgumentsError,
        "the number of GPUs must divide the model's attention heads: choose others with --devices",
        r"must be divisible by (?:tensor parallel size|tp_size)|is not divisible by weight quantization",
        source="config/model.py verify_with_parallel_config; quantization/utils/fp8_utils.py",
    ),
    rule(
        "context above native",
        EngineArgumentsError,
        "use a smaller --ctx-size, or --rope-scaling yarn",
        r"is greater than the derived max_model_len",
        source="config/model.py _get_and_verify_max_len",
    ),
    rule(
        "bf16 on an old GPU",
        EngineArgumentsError,
        "this GPU computes in float16: leave the type to the plan",
        r"Bfloat16 is only supported on GPUs",
        source="platforms/cuda.py check_if_supports_dtype",
    ),
    rule(
        "KV cache type on an old GPU",
        EngineArgumentsError,
        "leave --kv-type out, or set it to auto",
        r"KV cache is not supported (?:by|on) ",
        source="v1/attention/backends/triton_attn.py, mla/triton_mla.py",
    ),
    rule(
        "more ranks than GPUs",
        EngineArgumentsError,
        "use as many --devices as the container has",
        r"World size \(\d+\) is larger than the number of available GPUs",
        source="config/parallel.py",
    ),
    rule(
        "no attention for this GPU",
        EngineArgumentsError,
        "this GPU has no attention kernel for this model and KV cache: leave --kv-type and the backend to the plan",
        r"No valid attention backend found|Selected backend \S+ is not valid for this configuration",
        source="platforms/cuda.py get_attn_backend_cls",
    ),
    rule(
        "unknown architecture",
        ModelUnreadableError,
        _TOO_OLD,
        r"does not recognize this architecture|Model architectures .* (?:are not supported|failed to be inspected)",
        r"Unknown quantization method: ",
        source="transformers configuration_auto.py; models/registry.py; config/model.py _verify_quantization",
    ),
    rule(
        "LoRA rank",
        EngineArgumentsError,
        "the adapter's rank is above what the engine was started with: give --max-lora-rank in --engine-arg",
        r"LoRA rank \d+ is greater than max_lora_rank",
        source="lora/peft_helper.py PEFTHelper.validate_legal",
    ),
    rule(
        "LoRA adapter of another model",
        ModelUnreadableError,
        "the LoRA adapter is of another model, or is damaged: use one that was trained on this model, or take it out",
        r"verify that the loaded LoRA module is correct|is unsupported LoRA weight|LoRAAdapterNotFoundError",
        r"embedding LoRA size\(\d+\) must be consistent|Missing required configuration fields: ",
        source="lora/lora_model.py from_lora_tensors, from_local_checkpoint; lora/utils.py parse_fine_tuned_lora_name; "
        "lora/peft_helper.py from_dict",
    ),
    rule(
        "draft model of another model",
        ModelUnreadableError,
        "the draft model is of another model: use one of the same family, or --speculation auto",
        r"Target and draft model should have the same vocabulary size|\bdraft \w+ must match the target",
        source="config/speculative.py verify_equal_vocab_size_if_draft_model",
    ),
    rule(
        "not for this GPU",
        EngineArgumentsError,
        _OTHER_QUANTIZATION,
        (_COMPUTED, _REFUSED, _CHIP),
        r"\S+ is not supported for quantization method |quantization is currently not supported in ",
        r"'_OpNamespace' '\w+' object has no attribute",
        source="config/vllm.py _get_quantization_config; quantization/compressed_tensors, quark, moe_wna16, torchao; "
        "model_executor/kernels/linear; fused_moe/oracle; csrc of _C and _moe_C (scaled_mm_entry.cu, marlin)",
    ),
    rule(
        "environment is no number",
        ConfigError,
        "a variable VLLM_* of the container is not a whole number: take it out",
        r"^  Value error, invalid literal for int\(\) with base 10",
        source="envs.py",
    ),
    rule(
        "kernel too large for the chip",
        EngineNotReadyError,
        "a kernel wants more of this chip's own fast memory than it has: choose another with "
        '--engine-arg "--attention-backend NAME", and report it with the lines above',
        r"OutOfResources: out of resource: ",
        source="triton/runtime/errors.py",
    ),
    rule(
        "a step took too long",
        EngineNotReadyError,
        "one of its processes was silent for longer than vLLM waits, 300 s by itself: set "
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS to more",
        r"TimeoutError: RPC call to \S+ timed out",
        source="v1/executor/multiproc_executor.py",
    ),
    rule(
        "processes did not meet",
        EngineNotReadyError,
        _GROUP,
        r"Timed out waiting for (?:new )?engine core processes|Timed out after \d+ seconds waiting for clients",
        r"Watchdog caught collective operation timeout",
        source="v1/engine/core_client.py; torch TCPStore.cpp, ProcessGroupNCCL.cpp",
    ),
    rule(
        "no compiler",
        EngineNotReadyError,
        "the engine wanted to compile a kernel and found no compiler for it in the image: try "
        '--engine-arg "--enforce-eager" or another model, and report it with the lines above',
        r"Failed to find C compiler|No working C\+\+ compiler found|Compiler: \S+ is not found|Ninja is required",
        r"nvcc not found at |Could not find nvcc",
        source="triton/runtime/build.py; torch/_inductor/exc.py, utils/cpp_extension.py; flashinfer/jit/cpp_ext.py",
    ),
    rule(
        "needs code of its own",
        ModelUnreadableError,
        "the model's folder brings code, which is not run: use another upload of it",
        r"contains custom code which must be executed",
        source="transformers dynamic_module_utils.py, as config/model.py passes it on",
    ),
    rule(
        "compiled file missing",  # before "model missing or damaged": a file in the cache never belongs to the model
        EngineNotReadyError,
        "what was compiled before is not whole: remove that folder from the volume, and the next start makes it anew",
        r"No such file or directory: .*/cache/[^/']+/(?:vllm|inductor|triton|flashinfer|deep_gemm|xdg|cuda)/",
        source="compilation/backends.py; triton/compiler/compiler.py",
    ),
    rule(
        "model cannot be opened",
        ModelUnreadableError,
        "make the files readable for the container's user or for group 0",
        r"\[Errno 13\] Permission denied: .*\.(?:safetensors|json|bin|pt|pth|model|jinja|txt)\b",
        source="glibc strerror(EACCES) with the name of the file",
    ),
    rule(
        "volume cannot be written",
        VolumeError,
        "the engine keeps its compiled kernels there: let the container's user or group 0 write it",
        r"\[Errno (?:13\] Permission denied|30\] Read-only file system): '/(?!tmp/|dev/|proc/|sys/)",
        source="glibc strerror(EACCES), strerror(EROFS) with the name of the file",
    ),
    rule(
        "model missing or damaged",
        ModelUnreadableError,
        _FETCH,
        r"Invalid repository ID or local directory specified|HFValidationError|Cannot find any model weights",
        r"SafetensorError|No such file or directory: .*\.(?:safetensors|json|bin|model)\b|is not a valid JSON file",
        r"Can't load (?:the configuration|tokenizer)|Couldn't instantiate the backend tokenizer",
        r"Weight files referenced in index but missing|Unrecognized model in |does not appear to have a file named",
        r"LocalEntryNotFoundError|OfflineModeIsEnabled",
        r"PytorchStreamReader failed|UnpicklingError: |Weights only load failed|corrupt file\?|^EOFError: Ran out",
        source="safetensors (serialize/deserialize); model_executor/model_loader; transformers; torch/serialization.py",
    ),
    rule(
        "made for another engine",
        ModelUnreadableError,
        _OTHER_LAYOUT,
        # The name of a tensor for which the model has no parameter: model_executor/models load_weights,
        # params_dict[name].
        r"^KeyError: ['\"](?=.*(?:\d|weight|bias|scale|proj|embed|norm|expert|lm_head|zeros))[\w-]+(?:\.[\w-]+)+['\"]$",
        r"There is no module or parameter named|Following weights were not initialized from checkpoint",
        r"Attempted to load (?:nested )?weight|was skipped because it is tied to|\bassert .*loaded_weight\b",
        r"size of (?:the )?tensor(?: a)? \(\d+\) must match the (?:size of tensor b|existing size)",
        r"size mismatch for \S+: copying a param",
        r"Error\(s\) in loading state_dict for |^RuntimeError: start \(\d+\) \+ length \(\d+\) exceeds dimension size",
        r"Cannot find the config file for |Found multiple config files for |Unsupported quantization config",
        r"quantization method specified in the model config|Model quantization method is not specified",
        source="model_executor/models/utils.py AutoWeightsLoader; model_executor/model_loader/weight_utils.py, "
        "default_loader.py; model_executor/parameter.py; torch nn/modules/module.py, ATen ExpandUtils.cpp",
    ),
    rule(
        "socket in use",
        EngineNotReadyError,
        "the engine's socket is already in use, which is a bug of the appliance: please report it with the lines above",
        r"(?i)\baddress already in use\b|The server socket has failed to (?:listen|bind)|EADDRINUSE",
        source="entrypoints/launchers (bind of the socket); torch TCPStore (socket.cpp)",
    ),
    rule(
        "config of another engine",
        ModelUnreadableError,
        _OTHER_LAYOUT,
        r"^AttributeError: '\w*Config' object has no attribute",
        r"^RuntimeError: shape '\[[-\d, ]+\]' is invalid for input of size \d+",
        source="transformers configuration_utils.py; torch ATen/InferSize.h",
        is_vague=True,
    ),
    rule(
        "unreadable JSON",
        ModelUnreadableError,
        _FETCH,
        r"^json\.decoder\.JSONDecodeError: ",
        source="CPython Lib/json/decoder.py, of a file of the model that nobody names",
        is_vague=True,
    ),
    # The rules for NCCL are vague, since an error of one process often follows from another process's end.
    rule(
        "CUDA failed under NCCL",
        GpuUnusableError,
        "a GPU or its driver failed under NCCL: `dmesg | grep Xid` on the host; NCCL_DEBUG=INFO tells more",
        r"unhandled cuda error",
        source="NCCL init.cc ncclGetErrorString, as distributed/device_communicators/pynccl_wrapper.py passes it on",
        is_vague=True,
    ),
    rule(
        "system failed under NCCL",
        EngineNotReadyError,
        "the GPUs' processes could not reach each other: start the container with --shm-size 8g or --ipc=host; with "
        "several hosts look at the network; NCCL_DEBUG=INFO tells more",
        r"unhandled system error|remote process exited or there was a network error",
        source="NCCL init.cc ncclGetErrorString",
        is_vague=True,
    ),
    rule(
        "compiling failed",
        EngineNotReadyError,
        f'a kernel could not be compiled: try --engine-arg "--enforce-eager", and report it; {LAST_LINES}',
        r"InductorError|BackendCompilerFailed|Error building extension|Ninja build failed",
        source="torch/_inductor/exc.py, _dynamo/exc.py, utils/cpp_extension.py; flashinfer/jit/cpp_ext.py",
        is_vague=True,
    ),
)
