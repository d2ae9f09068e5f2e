# `make package`: the program, the library and its headers as one Debian package.
set(CPACK_PACKAGE_NAME headroom)
set(CPACK_PACKAGE_VENDOR Headroom)
set(CPACK_PACKAGE_CONTACT "Headroom <headroom@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_RESOURCE_FILE_LICENSE ${CMAKE_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION
    "Headroom plans and runs training on LibTorch within a budget of bytes: gradient accumulation,
 recomputing and spilling that change memory and time, never the numbers.")
# The program finds OpenBLAS in the folder of this package's flavour; the others come by the libraries
# that it is linked with.
set(CPACK_DEBIAN_PACKAGE_DEPENDS libopenblas0-openmp)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SUGGESTS  # to build programs with the library
    "libtorch-dev, libgloo-dev, libspdlog-dev, libfmt-dev, libhwy-dev, libdnnl-dev, zlib1g-dev, libjpeg-dev, libpng-dev, libssl-dev, libutf8proc-dev")
include(CPack)
