#include "data/image_codecs.h"

#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <vector>

namespace headroom {
namespace {

class PngDecoder {
 public:
  explicit PngDecoder(std::string_view bytes) : bytes_(bytes) {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, on_error, on_warning);
    if (png_ != nullptr) info_ = png_create_info_struct(png_);
  }
  ~PngDecoder() { png_destroy_read_struct(&png_, &info_, nullptr); }
  PngDecoder(const PngDecoder&) = delete;
  PngDecoder& operator=(const PngDecoder&) = delete;

  // Nothing here has a destructor that a jump could pass over. Returns false on an error.
  bool decode(Pixels& image, std::vector<png_bytep>& rows) {
    if (info_ == nullptr) return fail("no memory to decode it");
    if (setjmp(escape_) != 0) return false;
    png_set_read_fn(png_, this, on_read);
    png_set_user_limits(png_, 1 << 20, 1 << 20);
    png_read_info(png_, info_);
    image.rows = png_get_image_height(png_, info_);
    image.columns = png_get_image_width(png_, info_);
    if (image.rows * image.columns > kMostPixels) return fail("it has too many pixels");
    const int color = png_get_color_type(png_, info_);
    image.channels = (color & PNG_COLOR_MASK_COLOR) != 0 ? 3 : 1;
    if (color == PNG_COLOR_TYPE_PALETTE) png_set_palette_to_rgb(png_);
    if (color == PNG_COLOR_TYPE_GRAY) png_set_expand_gray_1_2_4_to_8(png_);
    png_set_scale_16(png_);
    png_set_strip_alpha(png_);
    png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    if (static_cast<std::int64_t>(png_get_rowbytes(png_, info_)) != image.row_bytes())
      return fail("its rows are of an unknown kind");
    image.values.resize(static_cast<std::size_t>(image.rows * image.row_bytes()));
    rows.resize(static_cast<std::size_t>(image.rows));
    for (std::size_t i = 0; i < rows.size(); ++i)
      rows[i] = image.values.data() + static_cast<std::int64_t>(i) * image.row_bytes();
    png_read_image(png_, rows.data());
    png_read_end(png_, nullptr);
    return true;
  }

  const char* message() const { return message_; }

 private:
  bool fail(const char* message) {
    std::snprintf(message_, sizeof(message_), "%s", message);
    return false;
  }
  [[noreturn]] static void on_error(png_structp png, png_const_charp message) {
    auto* self = static_cast<PngDecoder*>(png_get_error_ptr(png));
    self->fail(message);
    std::longjmp(self->escape_, 1);
  }
  static void on_warning(png_structp /*png*/, png_const_charp /*message*/) {}
  static void on_read(png_structp png, png_bytep to, png_size_t count) {
    auto* self = static_cast<PngDecoder*>(png_get_io_ptr(png));
    if (count > self->bytes_.size()) png_error(png, "it ends before its image does");
    std::memcpy(to, self->bytes_.data(), count);
    self->bytes_.remove_prefix(count);
  }

  std::string_view bytes_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  jmp_buf escape_{};
  char message_[200] = "";
};

}  // namespace

std::string decode_png(std::string_view bytes, Pixels& image) {
  std::vector<png_bytep> rows;
  PngDecoder decoder(bytes);
  return decoder.decode(image, rows) ? std::string() : std::string(decoder.message());
}

}  // namespace headroom
