# Every dependency by pkg-config; a missing one is named with its Debian package.
find_package(PkgConfig)
if(NOT PkgConfig_FOUND)
  message(FATAL_ERROR "pkg-config is missing: apt-get install pkg-config")
endif()
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# baton_dependency(target module package [library...]): an imported target for a pkg-config module.  The
# libraries are named where the module's own list is for static linking (gRPC's has a hundred).
function(baton_dependency target module package)
  pkg_check_modules(${target} QUIET ${module})
  if(NOT ${target}_FOUND)
    message(FATAL_ERROR "${module} is missing: apt-get install ${package}")
  endif()
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  target_include_directories(${target} SYSTEM INTERFACE ${${target}_INCLUDE_DIRS})
  target_link_directories(${target} INTERFACE ${${target}_LIBRARY_DIRS})
  target_link_libraries(${target} INTERFACE ${ARGN})
endfunction()

baton_dependency(dep_grpc grpc libgrpc-dev grpc gpr)
baton_dependency(dep_protobuf_c libprotobuf-c libprotobuf-c-dev protobuf-c)
baton_dependency(dep_crypto libcrypto libssl-dev crypto)
baton_dependency(dep_isal libisal libisal-dev isal)
baton_dependency(dep_pcre2 libpcre2-8 libpcre2-dev pcre2-8)
baton_dependency(dep_xxhash libxxhash libxxhash-dev xxhash)
baton_dependency(dep_cjson libcjson libcjson-dev cjson)
baton_dependency(dep_check check check check subunit m)

find_program(PROTOC_C protoc-c)
if(NOT PROTOC_C)
  message(FATAL_ERROR "protoc-c is missing: apt-get install protobuf-c-compiler")
endif()
