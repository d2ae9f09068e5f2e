#include "data/image_codecs.h"

#include <csetjmp>
#include <cstdio>

// In this order: the libraries' headers need FILE.
#include <jpeglib.h>

#include <jerror.h>

namespace headroom {
namespace {

// The library's error state comes first, so that its pointer is a pointer to this.
struct ErrorState {
  jpeg_error_mgr base;
  jmp_buf escape;
  char message[JMSG_LENGTH_MAX];
  bool is_damaged;
};

[[noreturn]] void on_error(j_common_ptr info) {
  auto* state = reinterpret_cast<ErrorState*>(info->err);
  info->err->format_message(info, state->message);
  std::longjmp(state->escape, 1);
}

// The library warns of damage, decodes what it can and makes up the rest. Bytes between the parts
// of a file are harmless, and common.
void on_message(j_common_ptr info, int level) {
  if (level >= 0) return;
  auto* state = reinterpret_cast<ErrorState*>(info->err);
  switch (info->err->msg_code) {
    case JWRN_JPEG_EOF:
    case JWRN_HIT_MARKER:
    case JWRN_HUFF_BAD_CODE:
    case JWRN_MUST_RESYNC:
    case JWRN_BOGUS_PROGRESSION:
      if (!state->is_damaged) info->err->format_message(info, state->message);
      state->is_damaged = true;
      break;
    default:
      break;
  }
}

class JpegDecoder {
 public:
  JpegDecoder() {
    info_.err = jpeg_std_error(&errors_.base);
    errors_.base.error_exit = on_error;
    errors_.base.emit_message = on_message;
    errors_.message[0] = '\0';
    errors_.is_damaged = false;
    jpeg_create_decompress(&info_);
  }
  ~JpegDecoder() { jpeg_destroy_decompress(&info_); }
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;

  // Nothing here has a destructor that a jump could pass over. Returns false on an error.
  bool decode(std::string_view bytes, Pixels& image) {
    if (setjmp(errors_.escape) != 0) return false;
    jpeg_mem_src(&info_, reinterpret_cast<const unsigned char*>(bytes.data()),
                 static_cast<unsigned long>(bytes.size()));
    jpeg_read_header(&info_, TRUE);
    if (info_.jpeg_color_space == JCS_CMYK || info_.jpeg_color_space == JCS_YCCK) {
      std::snprintf(errors_.message, sizeof(errors_.message),
                    "CMYK colours cannot be served here; convert it to RGB");
      return false;
    }
    const bool is_gray = info_.jpeg_color_space == JCS_GRAYSCALE;
    info_.out_color_space = is_gray ? JCS_GRAYSCALE : JCS_RGB;
    image.rows = info_.image_height;
    image.columns = info_.image_width;
    image.channels = is_gray ? 1 : 3;
    if (image.rows * image.columns > kMostPixels) {
      std::snprintf(errors_.message, sizeof(errors_.message), "%ld x %ld pixels are too many",
                    static_cast<long>(image.rows), static_cast<long>(image.columns));
      return false;
    }
    image.values.resize(static_cast<std::size_t>(image.rows * image.row_bytes()));
    jpeg_start_decompress(&info_);
    while (info_.output_scanline < info_.output_height) {
      JSAMPROW row = image.values.data() +
                     static_cast<std::int64_t>(info_.output_scanline) * image.row_bytes();
      jpeg_read_scanlines(&info_, &row, 1);
    }
    jpeg_finish_decompress(&info_);
    return !errors_.is_damaged;
  }

  const char* message() const { return errors_.message; }

 private:
  ErrorState errors_{};
  jpeg_decompress_struct info_{};
};

}  // namespace

std::string decode_jpeg(std::string_view bytes, Pixels& image) {
  JpegDecoder decoder;
  return decoder.decode(bytes, image) ? std::string() : std::string(decoder.message());
}

}  // namespace headroom
