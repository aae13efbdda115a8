#include <tvm/ffi/tvm_ffi.h>
namespace airside { int64_t ping() { return 1; } }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(ping, airside::ping);
